"""`[keep]`: how long finished jobs and logs are kept."""

from pathlib import Path
from typing import Any

import pytest

from gpuyard.config import KeepConfig, parse_config
from gpuyard.errors import UserError

FILE = Path("/home/ada/config.toml")


def keep(**values: Any) -> KeepConfig:
    return parse_config({"keep": values}, FILE).keep


def test_the_defaults_keep_jobs_for_90_days_and_20_gb_of_logs() -> None:
    assert (keep().jobs_s, keep().logs_s, keep().most_log_mb) == (90 * 86400.0, None, 20 * 1024.0)


def test_limits_have_units_and_forever_is_none() -> None:
    found = keep(jobs="forever", logs="36h", log_bytes="forever")
    assert (found.jobs_s, found.logs_s, found.most_log_mb) == (None, 36 * 3600.0, None)
    assert keep(log_bytes=3 * 1048576).most_log_mb == 3.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"jobs": "0d"}, 'jobs = \'0d\' is too little; write it as "90d", "1h" at least, or "forever" to keep all'),
        ({"jobs": "never"}, "jobs: 'never' is not a time; write it as \"90d\""),
        ({"logs": "7200"}, "logs = '7200' has no unit"),
        ({"jobs": 90}, "[keep] jobs takes text in quotes, not a whole number"),
        ({"log_bytes": 0}, "log_bytes = '0B' is too little; write it as \"20G\", \"1M\" at least"),
        ({"log_bytes": "20 apples"}, "log_bytes: '20 apples' is not a size"),
        ({"log_bytes": "500000"}, "log_bytes = '500000' has no unit"),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_with_what_to_write(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        keep(**values)
    assert str(FILE) in str(refused.value)
    assert message in str(refused.value)


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(UserError) as refused:
        keep(log_byte="20G")
    assert "did you mean log_bytes?" in str(refused.value)
