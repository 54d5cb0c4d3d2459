"""What a request says, made into values; UserError for what cannot be understood."""

import json
import math
from collections.abc import Mapping
from typing import Any

from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.job.selection import JobSelection, parse_selection
from gpuyard.core.units import parse_duration
from gpuyard.daemon.server.http_parser import Request
from gpuyard.errors import UserError


def read_body(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(request.body or b"{}")
    except (ValueError, RecursionError) as error:
        raise UserError(f"the request's body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise UserError("the request's body is no JSON object")
    _refuse_half_letters(request.body, body)
    return body


def _refuse_half_letters(sent: bytes, body: dict[str, Any]) -> None:
    """JSON can say half of a letter that takes two; nothing is called so, and the database would not take it."""
    if b"\\u" not in sent:
        return
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UserError("the request's body has a half of a letter in it", hint="send it as UTF-8") from None


def read_selection(ids: object) -> JobSelection:
    if isinstance(ids, list):
        ids = " ".join(map(str, ids))
    return parse_selection(str(ids or ""))


def read_state(word: str) -> JobState:
    try:
        return JobState(word)
    except ValueError:
        raise UserError(f"'{word}' is no state", hint=f"it can be {', '.join(JobState)}") from None


def read_whole(text: str | None, default: int) -> int:
    if text is None:
        return default
    if not text.isdecimal() or len(text) > 9:
        raise UserError(f"'{text}' is no whole number")
    return int(text)


def read_number(text: str | None, default: float) -> float:
    try:
        number = default if text is None else float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"'{text}' is no number")
    return max(0.0, number)


def read_priority(body: dict[str, Any]) -> int:
    told = body.get("priority")
    try:
        priority = int(str(told))
    except ValueError:
        raise UserError("the priority is no whole number", hint="gpuyard priority 17 50") from None
    if abs(priority) > 1_000_000:
        raise UserError(f"the priority {priority} is out of range", hint="give it from -1,000,000 to 1,000,000")
    return priority


def read_age(body: dict[str, Any]) -> float:
    """In seconds, or as people write it."""
    age = body.get("older_than_s")
    if isinstance(age, str):
        return parse_duration(age)
    if not isinstance(age, int | float) or isinstance(age, bool) or not 0 <= age < math.inf:
        raise UserError("older_than_s is missing", hint="say how old they have to be, such as 30d")
    return float(age)


def read_tag(asked: Mapping[str, Any]) -> str:
    tag = asked.get("tag")
    if not isinstance(tag, str) or not tag:
        raise UserError("which tag is meant?", hint="say it as tag=night")
    return tag


def read_words(body: dict[str, Any]) -> list[str] | None:
    """Which estimates are meant: `{"words": […]}`, or `None` for `{"all": true}`."""
    words, is_all = body.get("words"), body.get("all")
    if not isinstance(words, list | None) or not isinstance(is_all, bool | None):
        raise UserError("words are a list, and all is true or false")
    if bool(words) == bool(is_all):
        raise UserError("which estimates are meant?", hint='say {"words": ["train.py"]} or {"all": true}')
    return None if is_all else list(map(str, words or ()))
