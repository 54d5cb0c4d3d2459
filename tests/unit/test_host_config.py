"""`[host]`: RAM that stays free, limits of RAM, and CPUs of their own for jobs."""

from pathlib import Path
from typing import Any

import pytest

from gpuyard.config import HostConfig, parse_config
from gpuyard.errors import UserError

FILE = Path("/home/ada/config.toml")


def host(**values: Any) -> HostConfig:
    return parse_config({"host": values}, FILE).host


def test_by_default_the_floor_follows_from_the_ram_and_nothing_is_enforced() -> None:
    assert (host().keep_free_mb, host().enforce_ram, host().pin_cpus) == (None, False, False)


def test_the_floor_is_a_size() -> None:
    assert (host(keep_free="4G").keep_free_mb, host(keep_free="0").keep_free_mb) == (4096.0, 0.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"keep_free": "much"}, 'write a size such as "4G", or "0" for no floor'),
        ({"keep_free": 4}, "$.host.keep_free"),
        ({"pin_cpus": "yes"}, "$.host.pin_cpus"),
        ({"keep_fre": "4G"}, "keep_fre"),
    ],
)
def test_a_bad_value_is_refused_with_what_to_write(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        host(**values)
    assert message in str(caught.value)
    assert "keep_fre" not in values or caught.value.hint == "did you mean `keep_free`?"
