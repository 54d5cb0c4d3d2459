"""The jobs that IDS on the command line select, and the daemon's answers about each of them."""

from gpuyard.connect.fast_http import connect
from gpuyard.errors import UserError
from gpuyard.ui.cli.terminal import say, say_json
from gpuyard.ui.cli.verb_options import IDS, Typed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Ask = Callable[[str, dict[str, str] | None], Any]
    Answer = dict[str, Any]

_PAGE = 1000
_MOST_NAMED = 5


def show_each(typed: Typed, view: str, show: "Callable[[Answer], None]", query: "dict[str, str] | None" = None) -> int:
    """Request this view (such as `/why`) of each selected job, and print it; JSON is a list if there are several."""
    if not typed.arguments:
        raise UserError("which job?", hint=f"name it, or several: {IDS}")
    with connect(start=True) as queue:

        def ask(path: str, query: "dict[str, str] | None") -> "Any":
            return queue.request("GET", path, query)

        ids = _select(ask, " ".join(typed.arguments))
        answers = (ask(f"/jobs/{job_id}{view}", query) for job_id in ids)
        if typed.flag("json"):
            views = list(answers)
            say_json(views[0] if len(views) == 1 else views)
            return 0
        for number, answer in enumerate(answers):
            if number:
                say("")
            show(answer)
        return 0


def select_one(ask: "Ask", word: str) -> int:
    """Return the id of the only job that `word` selects; UserError if there are several."""
    if _is_id(word):
        return int(word)
    page = ask("/jobs", {"ids": word, "limit": str(_MOST_NAMED)})
    found = _ids(page, word)
    if len(found) > 1:
        some = ", ".join(map(str, found)) + (" and more" if page["next"] is not None else "")
        raise UserError(f"'{word}' matches several jobs: {some}", hint=f"name one of them, such as {found[-1]}")
    return found[0]


def _select(ask: "Ask", selection: str) -> list[int]:
    if _is_id(selection):
        return [int(selection)]
    query = {"ids": selection, "limit": str(_PAGE)}
    page = ask("/jobs", query)
    ids = _ids(page, selection)
    while page["next"] is not None:
        page = ask("/jobs", {**query, "after": str(page["next"])})
        ids += _ids(page, selection)
    return ids


def _ids(page: "Answer", selection: str) -> list[int]:
    if not page["jobs"]:
        raise UserError(f"'{selection}' matches no job", hint="`gpuyard queue --all` lists all jobs")
    return [job["id"] for job in page["jobs"]]


def _is_id(word: str) -> bool:
    return word.isascii() and word.isdigit()
