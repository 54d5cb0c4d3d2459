"""The jobs that are meant by what was typed, and what the daemon tells about each of them."""

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
_TOLD = 5


def tell_each(typed: Typed, view: str, tell: "Callable[[Answer], None]", query: "dict[str, str] | None" = None) -> int:
    """Asks for this view (`/why`) of each job that is meant; JSON is a list where there are several."""
    if not typed.words:
        raise UserError("which job?", hint=f"name it, or several: {IDS}")
    with connect(start=True) as queue:

        def ask(path: str, query: "dict[str, str] | None") -> "Any":
            return queue.request("GET", path, query)

        ids = _meant(ask, " ".join(typed.words))
        answers = (ask(f"/jobs/{job_id}{view}", query) for job_id in ids)
        if typed.flag("json"):
            told = list(answers)
            say_json(told[0] if len(told) == 1 else told)
            return 0
        for number, answer in enumerate(answers):
            if number:
                say("")
            tell(answer)
        return 0


def only_one(ask: "Ask", word: str) -> int:
    """The one job that is meant; UserError where there are several."""
    if _is_id(word):
        return int(word)
    page = ask("/jobs", {"ids": word, "limit": str(_TOLD)})
    found = _ids(page, word)
    if len(found) > 1:
        some = ", ".join(map(str, found)) + (" and more" if page["next"] is not None else "")
        raise UserError(f"'{word}' means several jobs: {some}", hint=f"name one of them, such as {found[-1]}")
    return found[0]


def _meant(ask: "Ask", words: str) -> list[int]:
    if _is_id(words):
        return [int(words)]
    query = {"ids": words, "limit": str(_PAGE)}
    page = ask("/jobs", query)
    ids = _ids(page, words)
    while page["next"] is not None:
        page = ask("/jobs", {**query, "after": str(page["next"])})
        ids += _ids(page, words)
    return ids


def _ids(page: "Answer", words: str) -> list[int]:
    if not page["jobs"]:
        raise UserError(f"'{words}' means no job", hint="`gpuyard queue --all` shows those there are")
    return [job["id"] for job in page["jobs"]]


def _is_id(word: str) -> bool:
    return word.isascii() and word.isdigit()
