"""Errors in the configuration file: one line with the line, the key, and what it takes."""

from pathlib import Path
from typing import Any

import pytest

from gpuyard import config
from gpuyard.config import Config, NotifyConfig, config_fault, load_config, parse_config, tolerate_faults
from gpuyard.errors import UserError
from gpuyard.model.energy import EnergyPrice
from gpuyard.policy.host_room import HostLimits
from gpuyard.queue.configured_rules import read_rules


@pytest.fixture
def file(own_home: Path) -> Path:
    own_home.mkdir(mode=0o700)
    return own_home / "config.toml"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ('[host]\nkeep_free = "4G"\n[host]\n', 3, "[host] is there a second time; add its keys to line 1"),
        ("[queue.tags]\na = 1\n[queue.tags]\n", 3, "[queue.tags] is there a second time; add its keys to line 1"),
        ("[queue\ncpu_jobs = 3", 1, "this is not valid TOML at [queue: expected ']' at the end of a table declaration"),
        ("[queue]\ncpu_jobs = 3\ncpu_jobs = 4", 3, "this is not valid TOML at cpu_jobs: cannot overwrite a value"),
        ('# a\n[queue]\ncpu_jobs = "3"', 3, "[queue] cpu_jobs takes a whole number, not text in quotes"),
        ("queue.cpu_jobs = 0", 1, "[queue] cpu_jobs takes a whole number >= 1"),
        ("[queue.tags]\na = -1", 1, "[queue] tags takes a whole number >= 0"),
        ("[host]\nenforce_ram = 1", 2, "[host] enforce_ram takes true or false, not a whole number"),
        ("queue = 3", 1, "queue takes a table of keys, not a whole number"),
        ("web = 3", 1, "web takes true or false or a table of keys, not a whole number"),
        ("[queue]\n\ncpu_jbos = 3", 3, "[queue] has no key cpu_jbos; did you mean cpu_jobs?"),
        ("[web]\nprot = 3", 2, "[web] has no key prot; did you mean port?"),
        ("[suspend]\nfoo = 3", 2, "[suspend] has no key foo; there are: ram_reserve_mb"),
        ("[quueue]\ncpu_jobs = 3", 1, "there is no section or key quueue; did you mean queue?"),
        ('[packing]\nfirst_run = "alon"', 2, "[packing] first_run takes 'share' or 'alone', not 'alon'"),
        ('[packing]\n[host]\nkeep_free = "4"', 3, "[host] keep_free = '4' has no unit; write a size such as"),
        ('[notify]\non = ["never"]', 1, "[notify] there is no event 'never'; events are"),
    ],
)  # fmt: skip
def test_an_error_names_its_line_its_key_and_what_it_takes(file: Path, text: str, line: int, message: str) -> None:
    file.write_text(text)
    with pytest.raises(UserError) as refused:
        load_config()
    assert str(refused.value).startswith(f"{file}:{line}: {message}")
    assert (refused.value.hint, "\n" in str(refused.value)) == (None, False)


def test_other_errors_name_their_line(file: Path) -> None:
    file.write_text('[devices]\nvendor = "nvida"')
    with pytest.raises(UserError, match=r":2: \[devices\] vendor takes 'nvidia' or 'amd' or .*, not 'nvida'$"):
        load_config()
    # A file that is not utf 8 names the line.
    file.write_bytes(b"[web]\n# caf\xe9\nport = 1\n")
    with pytest.raises(UserError, match=r":2: byte 0xe9 is not UTF-8; save the file as UTF-8$"):
        load_config()
    file.write_text('[notify]\nto = ["ntfy://hidden]')
    with pytest.raises(UserError, match=":2: this is not valid TOML at to: unterminated string") as refused:
        load_config()
    assert "hidden" not in str(refused.value), "broken toml does not show the value"


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name, value in (("report", None), ("config", Config()), ("fault", None)):
        monkeypatch.setattr(config._Tolerance, name, value)
    found: list[str] = []
    tolerate_faults(lambda error: found.append(str(error)))
    return found


def test_a_tolerated_fault_is_reported_once_and_the_settings_before_stay(file: Path, reports: list[str]) -> None:
    assert load_config() == Config()
    file.write_text("[queue]\ncpu_jobs = 3")
    assert load_config().queue.cpu_jobs == 3
    file.write_text("[queue]\ncpu_jobs = 0")
    assert [load_config().queue.cpu_jobs for _ in range(2)] == [3, 3]
    assert reports == [config_fault()] == [f"{file}:2: [queue] cpu_jobs takes a whole number >= 1"]
    file.write_text("[queue]\ncpu_jobs = 4")
    assert (load_config().queue.cpu_jobs, config_fault()) == (4, None)


FILE = Path("/home/ada/config.toml")


def parse(**sections: Any) -> Config:
    return parse_config(sections, FILE)


def test_the_defaults_of_hosts_energy_finished_jobs_and_notifications() -> None:
    config = parse()
    host, energy, keep = config.host, config.energy, config.keep
    assert (host.min_free_disk_mb, host.max_gpu_power_w) == (1024.0, None)
    assert (host.keep_free_mb, host.max_cpu_load) == (None, None), "the floor follows from the RAM"
    assert (host.enforce_ram, host.pin_cpus) == (False, False)
    assert (energy.price, energy.gco2_per_kwh) == (None, None)
    assert (keep.jobs_s, keep.logs_s, keep.most_log_mb) == (90 * 86400.0, None, 20 * 1024.0)
    assert config.notify == NotifyConfig(on=("failed", "queue-empty"), to=(), per_minute=6, gpu_free_s=30.0)
    assert parse(notify={"to": ["ntfy://topic"]}).notify.on == ("failed", "queue-empty")


@pytest.mark.parametrize(("text", "megabytes"), [("0", 0.0), ("500M", 500.0), ("2G", 2048.0), (1048576, 1.0), (0, 0.0)])
def test_the_free_space_is_a_size_or_a_number_of_bytes(text: str | int, megabytes: float) -> None:
    assert parse(host={"min_free_disk": text}).host.min_free_disk_mb == megabytes


def test_settings_are_read_with_their_units() -> None:
    host = parse(host={"keep_free": "4G", "max_cpu_load": 80}).host
    assert host.limits == HostLimits(keep_free_mb=4096.0, max_cpu_load_percent=80.0)
    assert parse(host={"keep_free": "0"}).host.keep_free_mb == 0.0
    keep = parse(keep={"jobs": "forever", "logs": "36h", "log_bytes": "forever"}).keep
    assert (keep.jobs_s, keep.logs_s, keep.most_log_mb) == (None, 36 * 3600.0, None)
    assert parse(keep={"log_bytes": 3 * 1048576}).keep.most_log_mb == 3.0
    asked = {"on": ["gpu-free"], "to": ["a command"], "per_minute": 1, "gpu_free_s": 0}
    assert parse(notify=asked).notify.on == ("gpu-free",)


def test_the_rules_of_the_queue_follow_the_file(own_home: Path) -> None:
    own_home.mkdir(mode=0o700)
    text = '[host]\nmin_free_disk = "5G"\nmax_gpu_power_w = 1500\n[energy]\nprice = 0.3\ngco2_per_kwh = 350\n'
    (own_home / "config.toml").write_text(text)
    rules = read_rules()
    assert (rules.host.min_free_disk_mb, rules.host.max_gpu_power_w) == (5120.0, 1500.0)
    assert rules.energy_price == EnergyPrice(price=0.3, currency="EUR", gco2_per_kwh=350.0)


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("host", {"min_free_disk": "much"}, "min_free_disk: 'much' is not a size; write it as \"1G\""),
        ("host", {"max_gpu_power_w": 0}, "[host] max_gpu_power_w takes a number > 0"),
        ("host", {"max_gpu_power": 5}, "did you mean max_gpu_power_w?"),
        ("host", {"keep_free": "much"}, 'write a size such as "4G", or "0" for no floor'),
        ("host", {"keep_free": "4"}, "keep_free = '4' has no unit; write a size such as"),
        ("host", {"keep_free": 4}, "[host] keep_free takes text in quotes, not a whole number"),
        ("host", {"max_cpu_load": 0}, "[host] max_cpu_load takes a number > 0"),
        ("host", {"pin_cpus": "yes"}, "[host] pin_cpus takes true or false"),
        ("host", {"keep_fre": "4G"}, "[host] has no key keep_fre; did you mean keep_free?"),
        ("energy", {"price": -1}, "[energy] price takes a number >= 0"),
        ("energy", {"currency": "E\nR"}, "currency takes plain text"),
        ("energy", {"prise": 1}, "[energy] has no key prise; did you mean price?"),
        ("keep", {"jobs": "0d"}, 'is too little; write it as "90d", "1h" at least, or "forever" to keep all'),
        ("keep", {"jobs": "never"}, "jobs: 'never' is not a time; write it as \"90d\""),
        ("keep", {"logs": "7200"}, "logs = '7200' has no unit"),
        ("keep", {"jobs": 90}, "[keep] jobs takes text in quotes, not a whole number"),
        ("keep", {"log_bytes": 0}, 'log_bytes = \'0B\' is too little; write it as "20G", "1M" at least'),
        ("keep", {"log_bytes": "20 apples"}, "log_bytes: '20 apples' is not a size"),
        ("keep", {"log_bytes": "500000"}, "log_bytes = '500000' has no unit"),
        ("keep", {"log_byte": "20G"}, "did you mean log_bytes?"),
        ("notify", {"on": ["failed", "done"]}, "there is no event 'done'; events are finished, failed, out-of-memory"),
        ("notify", {"to": ["ntfy://hidden", " "]}, "a notification needs a target"),
        ("notify", {"to": ["hidden" * 1000]}, "at most 4,000 characters"),
        ("notify", {"to": "ntfy://hidden"}, "[notify] to takes a list in brackets"),
        ("notify", {"per_minute": 0}, "[notify] per_minute takes a whole number >= 1"),
        ("notify", {"gpu_free_s": -1}, "[notify] gpu_free_s takes a number >= 0"),
        ("notify", {"per_minutes": 3}, "did you mean per_minute?"),
    ],
)
def test_a_bad_value_is_refused_and_targets_are_not_quoted(section: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        parse(**{section: values})
    assert str(FILE) in str(refused.value)
    assert message in str(refused.value)
    assert "hidden" not in str(refused.value)
