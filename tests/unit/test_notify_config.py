"""Valid and invalid `[notify]` settings; error messages never contain secrets."""

from pathlib import Path
from typing import Any

import pytest

from gpuyard.config import NotifyConfig, parse_config
from gpuyard.errors import UserError


def read(**notify: Any) -> NotifyConfig:
    return parse_config({"notify": notify}, Path("config.toml")).notify


def test_the_default_sends_nothing_and_a_target_gets_failures_and_the_end_of_the_queue() -> None:
    assert read() == NotifyConfig(on=("failed", "queue-empty"), to=(), per_minute=6, gpu_free_s=30.0)
    assert read(to=["ntfy://topic"]).on == ("failed", "queue-empty")
    assert read(on=["gpu-free"], to=["a command"], per_minute=1, gpu_free_s=0).on == ("gpu-free",)


@pytest.mark.parametrize(
    ("notify", "message"),
    [
        (
            {"on": ["failed", "done"]},
            "there is no event 'done'; events are finished, failed, out-of-memory, memory-guard",
        ),
        ({"to": ["ntfy://hidden", " "]}, "a notification needs a target"),
        ({"to": ["hidden" * 1000]}, "at most 4,000 characters"),
        ({"to": "ntfy://hidden"}, "[notify] to takes a list in brackets"),
        ({"per_minute": 0}, "[notify] per_minute takes a whole number >= 1"),
        ({"gpu_free_s": -1}, "[notify] gpu_free_s takes a number >= 0"),
    ],
)
def test_an_error_message_does_not_contain_the_target(notify: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        read(**notify)
    assert message in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_an_unknown_key_gets_a_suggestion() -> None:
    with pytest.raises(UserError) as caught:
        read(per_minutes=3)
    assert "did you mean per_minute?" in str(caught.value)
