"""What users see and what the planner decides, as text files: to compare two versions of the code.

`python -m bench baseline FOLDER` writes the help of all verbs, the routes, the keys of the configuration, the words for
states, events, outcomes and reasons, and the runs of 20 simulated worlds (`bench guarantees` has their figures), for
which GPUYARD_TRACES names a folder of measured programs. `diff -r` of two such folders is the comparison.
"""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from bench.guarantees import Case, play
from gpuyard.config import Config
from gpuyard.model.job import OutcomeKind, PublishedEventKind
from gpuyard.model.lifecycle import JobEvent, JobState
from gpuyard.policy.wait_reasons import ReasonKind
from gpuyard.schema.operations import document
from gpuyard.ui.cli.verbs import VERBS

_WORDS = (JobState, JobEvent, PublishedEventKind, OutcomeKind, ReasonKind)
_TRACES, _CARDS = (
    ("lucid", "carma", "lucid+carma:burst", "carma:hard", "openb"),
    ("1x24GB", "1x141GB", "2x24GB", "8x80GB"),
)


def bench_baseline(arguments: Sequence[str]) -> None:
    if len(arguments) != 1:
        raise SystemExit("usage: python -m bench baseline FOLDER")
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    routes = [
        f"{method.upper()} {path}"
        for path, operations in json.loads(document())["paths"].items()
        for method in operations
    ]
    files = {
        "help.txt": "".join(map(_help, sorted(VERBS))),
        "routes.txt": _lines(sorted(routes)),
        "config.json": json.dumps(msgspec.json.schema(Config), indent=1, sort_keys=True) + "\n",
        "words.txt": _lines(f"{kind.__name__} {each.value}" for kind in _WORDS for each in kind),
    }
    if "GPUYARD_TRACES" in os.environ:
        worlds = itertools.product(_TRACES, _CARDS)
        files["plans.txt"] = "".join(_world(Case(trace=trace, cards=cards, seed=1)) for trace, cards in worlds)
    for name, text in files.items():
        (folder / name).write_text(text)


def _help(verb: str) -> str:
    command = [sys.executable, "-m", "gpuyard", verb, "--help"]
    shown = subprocess.run(command, env={**os.environ, "COLUMNS": "100"}, capture_output=True, text=True, check=True)
    return f"# {verb}\n{shown.stdout}\n"


def _world(case: Case) -> str:
    lines = [f"# {case.trace} on {case.cards}"]
    for number, played in enumerate(play(case, 2), 1):
        runs = sorted(played.runs, key=lambda run: (run.started_s, run.job))
        lines += [f"{number} {run.started_s:.0f} {run.job} {run.devices} {run.outcome}" for run in runs]
    return _lines(lines)


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
