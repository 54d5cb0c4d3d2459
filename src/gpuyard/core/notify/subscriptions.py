"""Who wants to be told of what: events by their names, and targets as they were typed.

A target with `scheme://` is the URL of a service, which may hold secrets, and anything else a command, which may hold
some too: neither is ever shown but by its scheme or its first word.
"""

import re
from enum import StrEnum
from urllib.parse import unquote

from msgspec import Struct

from gpuyard.errors import UserError

MOST_WISHES = 16
_LONGEST_TARGET = 4000
# Spaces before it make it no command: a shell would tell of it, secrets and all.
_URL = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*)://")
_PLAIN_WORDS = re.compile(r"[a-z-]+(,[a-z-]+)*", re.ASCII)
_PROGRAM = re.compile(r"([\w./~+-]+)(\s|$)", re.ASCII)
_SEPARATORS = re.compile(r"[/:@?&=#,;\s]+")
_SHORTEST_SECRET = 3


class Event(StrEnum):
    FINISHED = "finished"
    FAILED = "failed"
    OUT_OF_MEMORY = "out-of-memory"
    QUEUE_EMPTY = "queue-empty"
    GPU_FREE = "gpu-free"


JOB_EVENTS = (Event.FINISHED, Event.FAILED, Event.OUT_OF_MEMORY)


class Subscription(Struct, frozen=True, kw_only=True):
    """Of these events of a job, to this target; to those of the configuration where it names none."""

    events: tuple[Event, ...] = JOB_EVENTS
    target: str | None = None


def parse_wish(text: str) -> Subscription:
    """`TARGET`, `EVENT,EVENT` or `EVENT,EVENT=TARGET`, as they are typed after --notify."""
    if _PLAIN_WORDS.fullmatch(text):
        return Subscription(events=_job_events(text))
    events, equals, target = text.partition("=")
    if equals and _PLAIN_WORDS.fullmatch(events):
        return Subscription(events=_job_events(events), target=check_target(target))
    return Subscription(target=check_target(text))


def as_typed(wish: Subscription) -> str:
    """What `parse_wish` makes it of."""
    events = ",".join(wish.events)
    return events if wish.target is None else f"{events}={wish.target}"


def check_target(text: str) -> str:
    if not text.strip():
        raise UserError("a notification needs a target", hint="a command, or a URL such as ntfy://topic")
    if "\0" in text or len(text) > _LONGEST_TARGET:
        raise UserError(f"a notification's target is plain text of at most {_LONGEST_TARGET:,} letters")
    return text


def parse_event(word: str) -> Event:
    try:
        return Event(word)
    except ValueError:
        raise UserError(f"there is no event '{word}'", hint=f"there are {', '.join(Event)}") from None


def is_url(target: str) -> bool:
    return _URL.match(target) is not None


def shown(target: str) -> str:
    """As much of it as anybody may see."""
    if url := _URL.match(target):
        return f"{url[1]}://…"
    program = _PROGRAM.match(target.strip())
    return program[1] if program is not None else "a command"


def redact(text: str, url: str) -> str:
    """`text` without any part of the URL but its scheme."""
    parts = _SEPARATORS.split(_URL.sub("", url, count=1))
    secrets = {each for part in parts for each in (part, unquote(part)) if len(each) >= _SHORTEST_SECRET}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "…")
    return text


def _job_events(words: str) -> tuple[Event, ...]:
    return tuple(dict.fromkeys(map(_job_event, words.split(","))))


def _job_event(word: str) -> Event:
    if word not in JOB_EVENTS:
        raise UserError(
            f"a job has no event '{word}' that --notify could tell of",
            hint=f"it has {', '.join(JOB_EVENTS)}; a command of one word is written as failed=COMMAND",
        )
    return Event(word)
