"""Ids of jobs from a script, as requests take them."""

from collections.abc import Iterable
from typing import TypeAlias

from gpuyard.errors import UserError

Ids: TypeAlias = int | str | Iterable[int | str]


def join_ids(ids: Ids | None) -> str | None:
    """Return ids as one text, None for None. An empty list is an error: it must not mean all jobs."""
    text = None if ids is None else id_text(ids)
    if text is not None and not text.strip():
        raise UserError("no job is given", hint="leave the ids out for all jobs")
    return text


def id_text(ids: Ids | Iterable[Ids]) -> str:
    if isinstance(ids, int | str):
        return str(ids)
    return " ".join(map(id_text, ids))
