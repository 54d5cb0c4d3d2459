"""Answers about many jobs of one submission: what would be submitted, and how far a sweep or an array is."""

from msgspec import Struct


class PreviewedJob(Struct, frozen=True, kw_only=True):
    """`values` are those of its placeholders."""

    command: str
    index: int | None
    values: dict[str, str]


class SubmissionPreview(Struct, frozen=True, kw_only=True):
    """What would be submitted: `count` jobs, of which `jobs` has the first 1,000. `varies` are the names of the values
    that differ between them."""

    count: int
    varies: tuple[str, ...]
    jobs: list[PreviewedJob]
    notes: list[str]


class GroupProgress(Struct, frozen=True, kw_only=True):
    """The jobs of a sweep or an array: their ids, such as `"17-56"`, how many there are in which state, and the same as
    a text, such as `12/40 done, 2 failed, 4 running`."""

    ids: str
    first: int
    last: int
    count: int
    counts: dict[str, int]
    text: str


class SweepColumn(Struct, frozen=True, kw_only=True):
    """A column of the table of a sweep. `kind` is how its cells are shown: text, seconds or figure."""

    name: str
    title: str
    kind: str
