"""What shells complete: job ids, states, tags, names, and the values of options.

The daemon is asked only if one runs, for at most half a second; whatever goes wrong completes nothing, silently.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import click
from click.shell_completion import CompletionItem

from gpuyard.connect.fast_http import connect
from gpuyard.errors import GpuyardError
from gpuyard.ui.cli.jobs.job_text import STATES, job_name
from gpuyard.ui.cli.verb_options import Arguments, Option

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

_TIMEOUT_S = 0.5
# The newest jobs are completed, and their tags and names.
_JOBS = 200
_KEYS = {"state": STATES, "tag": None, "name": None, "user": None, "since": ("10m", "1h", "12h", "1d", "7d")}
_FILES = {"from": "file", "stdin": "file", "output": "file", "error": "file", "cwd": "dir", "mount": "file"}
_VALUES = {
    "engine": ("local", "slurm", "ray"),
    "retry-on": ("failed", "timeout", "oom", "device"),
    "state": tuple(STATES),
}


def complete_option(option: Option, incomplete: str) -> list[CompletionItem]:
    """Return values of an option: its choices, files, or what the queue knows."""
    if option.name in _FILES:
        return [CompletionItem(incomplete, type=_FILES[option.name])]
    values: Iterable[str] = option.choices or _VALUES.get(option.name, ())
    if option.metavar == "IDS":
        return _ids(incomplete)
    if option.name in ("tag", "name"):
        values = _known(option.name)
    return _items(values, incomplete)


def complete_arguments(arguments: Arguments) -> Complete | None:
    """Return what completes positional arguments: selections of jobs; a program is left to the shell."""
    if "ID" not in arguments.metavar:
        return (lambda _, __, incomplete: [CompletionItem(incomplete, type="file")]) if arguments.is_program else None
    return _selection


def _selection(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete an id, or a key and its values. bash splits words at `=`: there, the words before end in KEY and `=`."""
    before = [word for word in ctx.params.get("arguments") or () if isinstance(word, str)]
    is_after_key = not incomplete and os.environ.get("COMP_WORDS", "").endswith("=")  # click makes the `=` empty
    if is_after_key and before and before[-1] in _KEYS:
        return _items(_values(before[-1]), "")
    if len(before) > 1 and before[-1] == "=" and before[-2] in _KEYS:
        return _listed(before[-2], "", incomplete)
    key, equals, value = incomplete.partition("=")
    if equals and key in _KEYS:
        return _listed(key, f"{key}=", value)
    keys = [CompletionItem(f"{each}=") for each in _KEYS if incomplete and each.startswith(incomplete)]
    return [*keys, *_ids(incomplete)]


def _listed(key: str, prefix: str, value: str) -> list[CompletionItem]:
    """Complete the last value of a list such as `failed,canc`."""
    head, comma, last = value.rpartition(",")
    return [CompletionItem(f"{prefix}{head}{comma}{each}") for each in _values(key) if each.startswith(last)]


def _values(key: str) -> Iterable[str]:
    fixed = _KEYS[key]
    return _known(key) if fixed is None else fixed


def _ids(incomplete: str) -> list[CompletionItem]:
    return [
        CompletionItem(str(job["id"]), help=f"{job['state']}: {job_name(job)}"[:60])
        for job in _jobs()
        if str(job["id"]).startswith(incomplete)
    ]


def _known(key: str) -> Iterator[str]:
    """Yield the values that jobs have, each once."""
    return iter(dict.fromkeys(str(job[key]) for job in _jobs() if job[key]))


def _items(values: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(value) for value in values if value.startswith(incomplete)]


@cache
def _jobs() -> tuple[dict[str, Any], ...]:
    """Return the newest jobs; none if no daemon runs, or if it does not answer at once."""
    try:
        with connect(start=False, on_notice=lambda _: None) as daemon:
            query = {"order": "newest", "limit": str(_JOBS)}
            return tuple(daemon.request("GET", "/jobs", query, None, _TIMEOUT_S)["jobs"])
    except (GpuyardError, OSError):
        return ()
