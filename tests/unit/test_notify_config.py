"""What `[notify]` may say, and what is wrong with the rest, without a word of its secrets."""

from pathlib import Path
from typing import Any

import pytest

from gpuyard.config import NotifyConfig, parse_config
from gpuyard.errors import UserError


def read(**notify: Any) -> NotifyConfig:
    return parse_config({"notify": notify}, Path("config.toml")).notify


def test_without_a_word_nobody_is_told_and_with_a_target_of_failures_and_of_the_end() -> None:
    assert read() == NotifyConfig(on=("failed", "queue-empty"), to=(), per_minute=6, gpu_free_s=30.0)
    assert read(to=["ntfy://topic"]).on == ("failed", "queue-empty")
    assert read(on=["gpu-free"], to=["a command"], per_minute=1, gpu_free_s=0).on == ("gpu-free",)


@pytest.mark.parametrize(
    ("notify", "words"),
    [
        (
            {"on": ["failed", "done"]},
            "there is no event 'done'; events are finished, failed, out-of-memory, queue-empty",
        ),
        ({"to": ["ntfy://hidden", " "]}, "a notification needs a target"),
        ({"to": ["hidden" * 1000]}, "at most 4,000 characters"),
        ({"to": "ntfy://hidden"}, "notify.to"),
        ({"per_minute": 0}, "notify.per_minute"),
        ({"gpu_free_s": -1}, "notify.gpu_free_s"),
    ],
)
def test_what_is_wrong_is_named_without_any_target(notify: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        read(**notify)
    assert words in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_a_key_that_is_nearly_right_is_named() -> None:
    with pytest.raises(UserError) as caught:
        read(per_minutes=3)
    assert "per_minute" in str(caught.value.hint)
