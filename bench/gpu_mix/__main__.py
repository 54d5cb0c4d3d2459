"""Real programs on one NVIDIA card, with nothing declared: one at a time without a scheduler, and through the queue.

    python -m bench.gpu_mix --out FILE
    python -m bench.gpu_mix --card-gb 40 --phases first,second --baseline FILE --out OTHER

Needs an idle NVIDIA card, PyTorch, torchvision, transformers, PyTorch Lightning, JAX and CuPy, but no network. FILE has
the figures of each phase, the attempts of each run, and the card's memory every 0.2 s; it is written after each phase.
"""

import argparse
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from bench.gpu_mix.card import card_of
from bench.gpu_mix.mix import PROGRAMS, Run, mix
from bench.gpu_mix.phases import Queue, Setting, alone, end_marked, queue, together, warm_up
from bench.gpu_mix.results import Phase, Summary, run_lines, summarize, summary_lines

_PHASES = ("alone", "together", "first", "second")
_WITHOUT_QUEUE = {"alone": alone, "together": together}
_WARM_UP_LIMIT_S = 150.0
_LIMIT_S = 330.0
# A pass through the queue that is slower than one at a time shows by how much, up to this factor.
_SLOWEST = 1.5
_RESERVE_S = 10.0


class Measured(Struct, kw_only=True):
    """What FILE holds."""

    began_at: float
    card_gb: float | None
    phases: list[Phase] = []
    summaries: list[Summary] = []

    def phase(self, name: str) -> Phase | None:
        return next((each for each in self.phases if each.name == name), None)


def main(arguments: Sequence[str], command: Sequence[str] | None = None) -> int:
    """Run the phases. `command` replaces the programs, to try out the measurement itself. Return 1 if a run did not
    succeed, or if its results differ."""
    options = _options(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    with tempfile.TemporaryDirectory(prefix="gpu-mix-") as folder, contextlib.ExitStack() as cleanup:
        setting = Setting(folder=Path(folder), runs=_runs(options.programs))
        if command is not None:
            setting = msgspec.structs.replace(setting, command=command)
        cleanup.callback(end_marked, setting.folder)
        measured = Measured(began_at=time.time(), card_gb=options.card_gb)
        _measure(setting, options, measured)
    return int(any(each.not_succeeded or each.other_results for each in measured.summaries))


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_mix", description=__doc__.partition("\n")[0])
    parser.add_argument("--card-gb", type=float, metavar="GB", help="a process of our own holds all memory but this")
    parser.add_argument("--phases", default="alone,first,second", help="of alone, together, first, second")
    parser.add_argument("--programs", default="", help="only these, such as vit,t5. [all]")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="an earlier FILE with the phase alone")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--minutes", type=float, default=9.0, help="end all after this time. [9]")
    parser.add_argument("--no-warm-up", action="store_true", help="do not first run each program in a tiny size")
    options = parser.parse_args(arguments)
    options.phases = options.phases.split(",")
    if unknown := set(options.phases) - set(_PHASES):
        parser.error(f"no phase {', '.join(sorted(unknown))}: choose from {', '.join(_PHASES)}")
    if "second" in options.phases and "first" not in options.phases:
        parser.error("the phase second needs the phase first, from which gpuyard learns")
    return options


def _runs(programs: str) -> list[Run]:
    wanted = programs.split(",") if programs else [each.name for each in PROGRAMS]
    if unknown := set(wanted) - {each.name for each in PROGRAMS}:
        raise SystemExit(f"no program {', '.join(sorted(unknown))}: see bench/gpu_mix/mix.py")
    return [run for run in mix() if run.program in wanted]


def _measure(setting: Setting, options: argparse.Namespace, measured: Measured) -> None:
    deadline = time.monotonic() + float(options.minutes) * 60
    baseline = _baseline(options.baseline, setting.runs)

    def left_s() -> float:
        return max(deadline - time.monotonic() - _RESERVE_S, 0.0)

    if not options.no_warm_up:
        began = time.monotonic()
        if problems := warm_up(setting, min(_WARM_UP_LIMIT_S, left_s())):
            raise SystemExit("\n\n".join(["these programs do not run:", *problems]))
        print(f"warm-up: {time.monotonic() - began:.1f} s", flush=True)
    with card_of(options.card_gb, setting.env()), contextlib.ExitStack() as queues:
        opened: Queue | None = None
        for name in [each for each in _PHASES if each in options.phases]:
            run: Callable[[float], Phase]
            if name in _WITHOUT_QUEUE:
                run = _without_queue(name, setting)
            else:
                opened = opened or queues.enter_context(queue(setting))
                run = _through(opened, name)
            phase = run(min(left_s(), _limit_s(name, baseline)))
            baseline = phase if name == "alone" else baseline
            _report(phase, baseline, measured, options.out)


def _baseline(file: Path | None, runs: Sequence[Run]) -> Phase | None:
    """Return the phase alone of an earlier measurement. Raises SystemExit if it had other runs."""
    if file is None:
        return None
    phase = msgspec.json.decode(file.read_bytes(), type=Measured).phase("alone")
    if phase is None or {each.name for each in phase.runs} != {run.name for run in runs}:
        raise SystemExit(f"{file} has no phase alone with the same runs")
    return phase


def _without_queue(name: str, setting: Setting) -> Callable[[float], Phase]:
    return lambda limit_s: _WITHOUT_QUEUE[name](setting, limit_s)


def _through(opened: Queue, name: str) -> Callable[[float], Phase]:
    return lambda limit_s: opened.run_all(name, limit_s)


def _limit_s(name: str, baseline: Phase | None) -> float:
    return _LIMIT_S if name == "alone" or baseline is None else min(_LIMIT_S, baseline.wall_s * _SLOWEST + _RESERVE_S)


def _report(phase: Phase, baseline: Phase | None, measured: Measured, out: Path | None) -> None:
    summary = summarize(phase, baseline)
    measured.phases.append(phase)
    measured.summaries.append(summary)
    print("\n".join([*summary_lines(summary), *run_lines(phase)]), flush=True)
    if out is not None:
        out.write_bytes(msgspec.json.encode(measured))


def _end(*_: object) -> None:
    raise SystemExit("ended by a signal")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
