"""Requests to the daemon: one request, one about each job that IDS select, and how an answer is printed."""

from gpuyard.connect.fast_http import DaemonConnection, connect
from gpuyard.errors import UserError
from gpuyard.ui.cli.terminal import say, say_json
from gpuyard.ui.cli.verb_options import IDS, Answer, Typed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any


_PAGE = 1000
_MOST_NAMED = 5


def request(
    method: str, path: str, query: "dict[str, str] | None" = None, body: object = None, *, is_repeatable: bool = False
) -> "Any":
    """Return the daemon's answer; starts the daemon if none runs."""
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
        ids = _select(daemon, " ".join(typed.arguments))
        answers = (daemon.request("GET", f"/jobs/{job_id}{view}", query) for job_id in ids)
        if typed.flag("json"):
            views = list(answers)
            say_json(views[0] if len(views) == 1 else views)
            return 0
        for number, answer in enumerate(answers):
            say(*([""] if number else []), *lines_of(answer))
        return 0


def select_one(get: "Callable[[str, dict[str, str]], Answer]", word: str) -> int:
    """Return the id of the only job that `word` selects; UserError if there are several."""
    if _is_id(word):
        return int(word)
    page = get("/jobs", {"ids": word, "limit": str(_MOST_NAMED)})
    found = _ids(page, word)
    if len(found) > 1:
        some = ", ".join(map(str, found)) + (" and more" if page["next"] is not None else "")
        raise UserError(f"'{word}' matches several jobs: {some}", hint=f"name one of them, such as {found[-1]}")
    return found[0]


def _select(daemon: DaemonConnection, selection: str) -> list[int]:
    if _is_id(selection):
        return [int(selection)]
    query = {"ids": selection, "limit": str(_PAGE)}
    page = daemon.request("GET", "/jobs", query)
    ids = _ids(page, selection)
    while page["next"] is not None:
        page = daemon.request("GET", "/jobs", {**query, "after": str(page["next"])})
        ids += _ids(page, selection)
    return ids


def _ids(page: Answer, selection: str) -> list[int]:
    if not page["jobs"]:
        raise UserError(f"'{selection}' matches no job", hint="`gpuyard queue --all` lists all jobs")
    return [job["id"] for job in page["jobs"]]


def _is_id(word: str) -> bool:
    return word.isascii() and word.isdigit()
