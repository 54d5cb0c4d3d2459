"""Subscriptions of notifications: which events go to which target. A target with `scheme://` is the URL of a service;
any other is a command. Both may hold secrets: messages show only the scheme of a URL and the first word of a
command.
"""

import re
from enum import StrEnum
from urllib.parse import unquote

from msgspec import Struct

from gpuyard.errors import UserError

MAX_SUBSCRIPTIONS = 16
_LONGEST_TARGET = 4000
# A URL with leading spaces is still a URL: run as a command, the shell would print it with its secrets.
_URL = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*)://")
_EVENT_LIST = re.compile(r"[a-z-]+(,[a-z-]+)*", re.ASCII)
_PROGRAM = re.compile(r"([\w./~+-]+)(\s|$)", re.ASCII)
_SEPARATORS = re.compile(r"[/:@?&=#,;\s]+")


class Event(StrEnum):
    FINISHED = "finished"
    FAILED = "failed"
    OUT_OF_MEMORY = "out-of-memory"
    MEMORY_GUARD = "memory-guard"
    HOST_GUARD = "host-guard"
    QUEUE_EMPTY = "queue-empty"
    GPU_FREE = "gpu-free"
    GPU_FAULT = "gpu-fault"


JOB_EVENTS = (Event.FINISHED, Event.FAILED, Event.OUT_OF_MEMORY, Event.MEMORY_GUARD, Event.HOST_GUARD)
# A job that made way goes on or runs again by itself, so these events have to be asked for.
DEFAULT_EVENTS = (Event.FINISHED, Event.FAILED, Event.OUT_OF_MEMORY)


class Subscription(Struct, frozen=True, kw_only=True):
    """Sends these events of a job to `target`; without one, to the targets of the configuration."""

    events: tuple[Event, ...] = DEFAULT_EVENTS
    target: str | None = None


def parse_subscription(text: str) -> Subscription:
    """Parse the value of --notify: `TARGET`, `EVENT,EVENT` or `EVENT,EVENT=TARGET`."""
    if _EVENT_LIST.fullmatch(text):
        return Subscription(events=_job_events(text))
    events, equals, target = text.partition("=")
    if equals and _EVENT_LIST.fullmatch(events):
        return Subscription(events=_job_events(events), target=check_target(target))
    return Subscription(target=check_target(text))


def subscription_text(subscription: Subscription) -> str:
    """Return the text from which `parse_subscription` makes this subscription."""
    events = ",".join(subscription.events)
    return events if subscription.target is None else f"{events}={subscription.target}"


def check_target(text: str) -> str:
    if not text.strip():
        raise UserError("a notification needs a target", hint="give a command, or a URL such as ntfy://topic")
    if "\0" in text or len(text) > _LONGEST_TARGET:
        raise UserError(f"the target of a notification is text of at most {_LONGEST_TARGET:,} characters without NUL")
    return text


def parse_event(name: str) -> Event:
    try:
        return Event(name)
    except ValueError:
        raise UserError(f"there is no event '{name}'", hint=f"events are {', '.join(Event)}") from None


def is_url(target: str) -> bool:
    return _URL.match(target) is not None


def redacted_target(target: str) -> str:
    """Return the part of a target that may be shown: the scheme of a URL, or the program of a command."""
    if url := _URL.match(target):
        return f"{url[1]}://…"
    program = _PROGRAM.match(target.strip())
    return program[1] if program is not None else "a command"


def redact(text: str, url: str) -> str:
    """Replace every part of the URL except its scheme in `text`."""
    parts = _SEPARATORS.split(_URL.sub("", url, count=1))
    secrets = {each for part in parts for each in (part, unquote(part)) if len(each) >= 3}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "…")
    return text


def _job_events(names: str) -> tuple[Event, ...]:
    for name in names.split(","):
        if name not in JOB_EVENTS:
            raise UserError(
                f"--notify does not know the job event '{name}'",
                hint=f"events are {', '.join(JOB_EVENTS)}; write a command of one word as failed=COMMAND",
            )
    return tuple(dict.fromkeys(map(Event, names.split(","))))
