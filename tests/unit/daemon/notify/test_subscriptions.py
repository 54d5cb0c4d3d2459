"""Subscriptions as users type them, and how much of a target is ever shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.errors import UserError
from gpuyard.model.submission import SubmissionRequest, parse_submission
from gpuyard.model.subscriptions import (
    DEFAULT_EVENTS,
    JOB_EVENTS,
    Event,
    Subscription,
    is_url,
    parse_subscription,
    redact,
    redacted_target,
    subscription_text,
)
from gpuyard.store.row_codec import spec_from_text, spec_to_text


@pytest.mark.parametrize(
    ("text", "events", "target"),
    [
        ("ntfy://topic", DEFAULT_EVENTS, "ntfy://topic"),
        ("json://host/?a=b,c", DEFAULT_EVENTS, "json://host/?a=b,c"),
        ('notify-send "$GPUYARD_TITLE"', DEFAULT_EVENTS, 'notify-send "$GPUYARD_TITLE"'),
        ("./tell", DEFAULT_EVENTS, "./tell"),
        ("TO=ada mail", DEFAULT_EVENTS, "TO=ada mail"),
        ("failed", (Event.FAILED,), None),
        ("failed,finished,failed", (Event.FAILED, Event.FINISHED), None),
        ("failed=tell", (Event.FAILED,), "tell"),
        ("out-of-memory,failed=json://host/?a=b", (Event.OUT_OF_MEMORY, Event.FAILED), "json://host/?a=b"),
    ],
)  # fmt: skip
def test_a_subscription_is_a_target_or_events_or_both(text: str, events: tuple[Event, ...], target: str | None) -> None:
    assert parse_subscription(text) == Subscription(events=events, target=target)
    assert parse_subscription(subscription_text(parse_subscription(text))) == parse_subscription(text)


@pytest.mark.parametrize("text", ["fnished", "failed,done", "done=ntfy://topic", "queue-empty", "gpu-free=tell"])
def test_an_unknown_event_is_refused_with_the_list_of_events(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_subscription(text)
    assert all(event in str(caught.value.hint) for event in JOB_EVENTS)


@pytest.mark.parametrize("text", ["", "  ", "failed=", "tell\0me", "x" * 5000 + " "])
def test_an_invalid_target_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse_subscription(text)


def test_too_many_subscriptions_are_refused() -> None:
    with pytest.raises(UserError, match="17 times"):
        parse_submission(SubmissionRequest(cwd="/", command=("true",), options={"notify": ["failed"] * 17}))


@pytest.mark.parametrize(
    ("target", "seen"),
    [
        ("slack://T0/B0/secret", "slack://…"), (" \tslack://T0/B0/secret", "slack://…"),
        ("notify-send hello", "notify-send"), ("/usr/bin/tell", "/usr/bin/tell"),
        ("TOKEN=secret tell", "a command"), ("'quoted secret' x", "a command"),
    ],
)  # fmt: skip
def test_only_the_scheme_or_the_program_of_a_target_is_shown(target: str, seen: str) -> None:
    assert redacted_target(target) == seen
    assert is_url(target) == ("://" in target)


WORD = st.text(alphabet="abcdefgh0123456789-_", min_size=3, max_size=12)


@given(user=WORD, password=WORD, path=WORD)
def test_the_parts_of_a_url_are_removed_from_a_services_answer(user: str, password: str, path: str) -> None:
    url = f"json://{user}:{password}@host.example/{path}?to={path}%20x"
    redacted = redact(f"QQQ {url} QQQ {path} QQQ {path} x QQQ {password}", url)
    assert redacted.count("QQQ") == 4
    assert not {user, password, path, "host.example"} & set(redacted.split())
    assert all(secret not in redacted.replace("json", "") for secret in (user, password, path, "host.example"))


def test_a_spec_keeps_its_subscriptions_and_an_old_spec_has_none() -> None:
    asked = SubmissionRequest(cwd="/", command=("true",), options={"notify": ["failed=ntfy://topic", "finished"]})
    spec = parse_submission(asked).spec
    assert spec.notify[0] == Subscription(events=(Event.FAILED,), target="ntfy://topic")
    text = spec_to_text(spec)
    assert spec_from_text(text) == spec
    assert "topic" not in repr(spec)
    before = text.partition(',"notify"')[0] + "}"
    assert spec_from_text(before).notify == ()
