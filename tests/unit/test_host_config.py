"""`[host]` in the configuration: the RAM that stays free, and the bound on CPUs."""

from pathlib import Path
from typing import Any

import pytest

from gpuyard.config import HostConfig, parse_config
from gpuyard.errors import UserError

PATH = Path("config.toml")


def test_the_floor_is_a_size() -> None:
    assert parse_config({"host": {"keep_free": "4G"}}, PATH).host.keep_free_mb == 4096.0


def test_without_a_floor_the_default_applies() -> None:
    assert HostConfig().keep_free_mb is None
    assert HostConfig().max_cpu_load is None


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ({"keep_free": "much"}, "keep_free: 'much' is not a size"),
        ({"keep_free": "4"}, "keep_free = '4' has no unit"),
        ({"keep_free": 4}, "keep_free"),
        ({"max_cpu_load": 0}, "max_cpu_load"),
        ({"keep_fre": "4G"}, "keep_fre"),
    ],
)
def test_a_bad_setting_is_refused_by_name(setting: dict[str, Any], names: str) -> None:
    with pytest.raises(UserError, match=names):
        parse_config({"host": setting}, PATH)
