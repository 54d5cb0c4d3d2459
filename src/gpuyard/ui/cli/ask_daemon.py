"""Requests to the daemon: one request, one about each job that IDS select, and how an answer is printed."""

from gpuyard.client.fast_http import connect
from gpuyard.errors import UserError
from gpuyard.ui.cli.command_grammar import IDS, Answer, Typed
from gpuyard.ui.cli.terminal import say, say_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any


def request(
    method: str, path: str, query: "dict[str, str] | None" = None, body: object = None, *, is_repeatable: bool = False
) -> "Any":
    with connect(start=True) as daemon:
        return daemon.request(method, path, query, body, is_repeatable=is_repeatable)


def say_answer(typed: Typed, answer: object, *lines: str) -> int:
    """Print the answer with --json, else the lines. Return 0, the exit status."""
    if typed.flag("json"):
        say_json(answer)
    else:
        say(*lines)
    return 0


def show_each(
    typed: Typed, view: str, lines_of: "Callable[[Answer], Iterable[str]]", query: "dict[str, str] | None" = None
) -> int:
    """Request this view (such as `/why`) of each selected job, and print it; JSON is a list if there are several."""
    if not typed.arguments:
        raise UserError("which job?", hint=f"name it, or several: {IDS}")
    with connect(start=True) as daemon:
        ids = select(daemon.request, typed.arguments)
        answers = (daemon.request("GET", f"/jobs/{job_id}{view}", query) for job_id in ids)
        if typed.flag("json"):
            views = list(answers)
            say_json(views[0] if len(views) == 1 else views)
            return 0
        for number, answer in enumerate(answers):
            say(*([""] if number else []), *lines_of(answer))
        return 0


def select_one(get: "Callable[[str, dict[str, str]], Answer]", word: str) -> int:
    """Return the id of the only job that `word`, a `selection_text`, selects; UserError if there are several."""
    if _is_id(word):
        return int(word)
    page = get("/jobs", {"ids": word, "limit": "5"})
    found = _ids(page, word)
    if len(found) > 1:
        some = ", ".join(map(str, found)) + (" and more" if page["next"] is not None else "")
        raise UserError(f"'{word}' matches several jobs: {some}", hint=f"name one of them, such as {found[-1]}")
    return found[0]


def select(get: "Callable[[str, str, dict[str, str]], Answer]", words: "Sequence[str]") -> list[int]:
    """Return the ids of all selected jobs, in pages; `get` makes a request. UserError if no job matches."""
    selection = selection_text(words)
    if _is_id(selection):
        return [int(selection)]
    query = {"ids": selection, "limit": "1000"}
    page = get("GET", "/jobs", query)
    ids = _ids(page, selection)
    while page["next"] is not None:
        page = get("GET", "/jobs", {**query, "after": str(page["next"])})
        ids += _ids(page, selection)
    return ids


def selection_text(words: "Sequence[str]") -> str:
    """Return the selection to send. A time of day in `since=` is one of this shell's time zone: it is sent as a date
    with its offset."""
    if not any(word.startswith("since=") for word in words):
        return " ".join(words)
    from gpuyard.ui.cli.local_time import with_offset

    return " ".join(f"since={with_offset(word[6:])}" if word.startswith("since=") else word for word in words)


def _ids(page: Answer, selection: str) -> list[int]:
    if not page["jobs"]:
        raise UserError(f"no job matches {selection}", hint="`gpuyard queue --all` lists all jobs", code="not_found")
    return [job["id"] for job in page["jobs"]]


def _is_id(word: str) -> bool:
    return word.isascii() and word.isdigit()
