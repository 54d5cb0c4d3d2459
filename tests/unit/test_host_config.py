"""`[host]` and `[energy]`: limits of the machine, RAM and CPUs of jobs, and what a kWh costs."""

from pathlib import Path
from typing import Any

import pytest

from gpuyard.config import Config, HostConfig, parse_config
from gpuyard.errors import UserError
from gpuyard.model.energy import EnergyPrice
from gpuyard.policy.host_room import HostLimits
from gpuyard.queue.configured_rules import read_rules

FILE = Path("/home/ada/config.toml")


def parse(**sections: Any) -> Config:
    return parse_config(sections, FILE)


def test_the_defaults_keep_1_gb_free_and_show_no_cost() -> None:
    config = parse()
    assert (config.host.min_free_disk_mb, config.host.max_gpu_power_w) == (1024.0, None)
    assert (config.energy.price, config.energy.gco2_per_kwh) == (None, None)


@pytest.mark.parametrize(("text", "megabytes"), [("0", 0.0), ("500M", 500.0), ("2G", 2048.0), (1048576, 1.0), (0, 0.0)])
def test_the_free_space_is_a_size_or_a_number_of_bytes(text: str | int, megabytes: float) -> None:
    assert parse(host={"min_free_disk": text}).host.min_free_disk_mb == megabytes


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"host": {"min_free_disk": "much"}}, "min_free_disk: 'much' is not a size; write it as \"1G\""),
        ({"host": {"max_gpu_power_w": 0}}, "[host] max_gpu_power_w takes a number > 0"),
        ({"energy": {"price": -1}}, "[energy] price takes a number >= 0"),
        ({"energy": {"currency": "E\nR"}}, "currency takes plain text"),
        ({"energy": {"prise": 1}}, "[energy] has no key prise; did you mean price?"),
    ],
)
def test_a_bad_value_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        parse(**sections)
    assert message in str(refused.value)


def test_a_misspelt_key_gets_a_hint() -> None:
    with pytest.raises(UserError) as refused:
        parse(host={"max_gpu_power": 5})
    assert "did you mean max_gpu_power_w?" in str(refused.value)


def test_the_rules_of_the_queue_follow_the_file(own_home: Path) -> None:
    own_home.mkdir(mode=0o700)
    text = '[host]\nmin_free_disk = "5G"\nmax_gpu_power_w = 1500\n[energy]\nprice = 0.3\ngco2_per_kwh = 350\n'
    (own_home / "config.toml").write_text(text)
    rules = read_rules()
    assert (rules.host.min_free_disk_mb, rules.host.max_gpu_power_w) == (5120.0, 1500.0)
    assert rules.energy_price == EnergyPrice(price=0.3, currency="EUR", gco2_per_kwh=350.0)


def host(**values: Any) -> HostConfig:
    return parse_config({"host": values}, FILE).host


def test_by_default_the_floor_follows_from_the_ram_and_nothing_is_enforced() -> None:
    assert (host().keep_free_mb, host().max_cpu_load) == (None, None)
    assert (host().enforce_ram, host().pin_cpus) == (False, False)


def test_the_floor_is_a_size() -> None:
    assert (host(keep_free="4G").keep_free_mb, host(keep_free="0").keep_free_mb) == (4096.0, 0.0)


def test_reservations_follow_the_floor_and_the_limit_on_cpus() -> None:
    assert host(keep_free="4G", max_cpu_load=80).limits == HostLimits(keep_free_mb=4096.0, max_cpu_load_percent=80.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"keep_free": "much"}, 'write a size such as "4G", or "0" for no floor'),
        ({"keep_free": "4"}, "keep_free = '4' has no unit; write a size such as"),
        ({"keep_free": 4}, "[host] keep_free takes text in quotes, not a whole number"),
        ({"max_cpu_load": 0}, "[host] max_cpu_load takes a number > 0"),
        ({"pin_cpus": "yes"}, "[host] pin_cpus takes true or false"),
        ({"keep_fre": "4G"}, "[host] has no key keep_fre; did you mean keep_free?"),
    ],
)
def test_a_bad_value_of_the_host_is_refused_with_what_to_write(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        host(**values)
    assert message in str(caught.value)
