"""Errors in the configuration file: one line with the line, the key, and what it takes."""

from pathlib import Path

import pytest

from gpuyard import config
from gpuyard.config import Config, config_fault, load_config, tolerate_faults
from gpuyard.errors import UserError


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
    # The vendors are listed.
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
