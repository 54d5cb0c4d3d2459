"""How many seeds, examples and jobs a test tries: few in `make test`, all in `make test-full` (GPUYARD_FULL=1)."""

import os
from collections.abc import Iterable
from typing import Any

import pytest

FULL = bool(os.environ.get("GPUYARD_FULL"))


def seeds(quick: int, *, full: int) -> int:
    """Return the number of seeds to play. GPUYARD_SEEDS=N overrides both."""
    return int(os.environ.get("GPUYARD_SEEDS") or (full if FULL else quick))


def size(quick: int, *, full: int) -> int:
    """Return the number of jobs, processes or repetitions."""
    return full if FULL else quick


def some(values: Iterable[Any], *quick: int) -> list[Any]:
    """Return parameters of a test: those at the positions `quick` run always, the others in `make test-full` only.

    A tuple is a set of parameters.
    """
    sets = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*each, marks=() if number in quick else pytest.mark.full) for number, each in enumerate(sets)]
