"""`gpuyard watch` and `gpuyard top`: GPUs and host live, as a table, lines or a log file; and the screen with
the queue."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.machine_snapshot import Sample, iso_time
from gpuyard.model.option import Option
from gpuyard.model.units import UNKNOWN
from gpuyard.probes.devices_and_processes import describe_processes
from gpuyard.probes.kernel_files import vendors_on_pci
from gpuyard.probes.local_machine import local_machine
from gpuyard.probes.sample_log import SampleLog
from gpuyard.probes.sampler import Sampler
from gpuyard.system.clock import SystemClock
from gpuyard.ui.cli.ask_daemon import request
from gpuyard.ui.cli.command_grammar import DEADLINE, Command, Typed, Verb
from gpuyard.ui.cli.terminal import is_terminal, note, pids_of, say
from gpuyard.ui.views import machine_tables as tables

WATCH = Verb(
    "Show the GPUs and the host live, and log them. Ctrl-C ends it.",
    (
        Option("interval", "time", "TIME", "Time between samples.", default="1s", least=0.05),
        Option("log", "text", "FILE.csv|FILE.jsonl", "Also append each sample to this file; rotated at 32 MB."),
        Option("count", "whole", "N", "Stop after N samples.", least=1),
        DEADLINE,
    ),
)


def _run_watch(typed: Typed) -> int:
    values = typed.values()
    log_path = Path(values["log"]) if values["log"] else None
    samples = _samples(values["interval"], log_path, values["count"], values["deadline"])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    show = _show_live if is_terminal(sys.stdout) else _print_lines
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the normal end
        show(samples)
    return 0


def _samples(interval_s: float, log_path: Path | None, count: int | None, deadline_s: float) -> Iterator[Sample]:
    clock = SystemClock()
    sink = SampleLog(log_path).write if log_path else None
    sampler = Sampler(local_machine(deadline_s), clock, sink=sink)
    with sampler.want(interval_s):
        taken = 0
        while count is None or taken < count:
            clock.sleep(sampler.due_in() or 0.0)
            yield sampler.sample()
            taken += 1


def _show_live(samples: Iterator[Sample]) -> None:
    from gpuyard.ui.views.live_display import LiveDisplay

    expected = vendors_on_pci()
    history: dict[str, list[float | None]] = {}
    with LiveDisplay(sys.stdout) as shown:
        for sample in samples:
            for device in sample.snapshot.devices:
                past = history.get(device.id, [])[-23:]
                history[device.id] = [*past, device.utilization_percent]
            processes = describe_processes(pids_of(sample.snapshot))
            shown.draw(
                tables.snapshot_lines(
                    sample.snapshot, shown.frame(), expected=expected, history=history, processes=processes
                )
            )


def _print_lines(samples: Iterator[Sample]) -> None:
    expected = vendors_on_pci()
    for sample in samples:
        snapshot = sample.snapshot
        time = iso_time(snapshot.taken_at)
        for problem in tables.relevant_problems(snapshot, expected):
            if problem in sample.new_problems:
                note(f"! {problem}")
        say(f"{time}  {tables.host_line(snapshot.host)}")
        for device in snapshot.devices:
            memory = (device.memory_used_mb, device.memory_total_mb, device.memory_used_at_least_mb)
            facts = [
                str(time),
                snapshot.labels.get(device.id, "?"),
                device.name or device.id,
                f"memory {tables.memory_text(*memory)}",
                f"use {tables.figure_text(device.utilization_percent, '%')}",
                f"smoothed {tables.figure_text(sample.loads.get(device.id), '%')}",
                f"power {tables.power_text(device.power_draw_w, device.power_limit_w)}",
                f"temp {tables.figure_text(device.temperature_c, 'C')}",
                f"procs {UNKNOWN if device.processes is None else len(device.processes)}",
            ]
            say("  ".join(facts if device.healthy else [*facts, f"unhealthy: {device.fault}"]))
        sys.stdout.flush()


TOP = Verb(
    """Watch the GPUs and the queue live, read logs, and act on jobs with a key.

    ? shows the keys, q quits. Needs the package textual, which the extra `top` of gpuyard installs.
    """
)


def _run_top(_: Typed) -> int:
    is_terminal = all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    if not is_terminal or os.environ.get("TERM", "dumb") == "dumb":
        raise UserError("`gpuyard top` needs a terminal", hint="in a pipe use `gpuyard queue` and `gpuyard devices`")
    try:
        from gpuyard.ui.tui.app import Top
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in {"textual", "rich"}:  # which textual brings along
            raise
        from gpuyard.installation import find_installation

        raise EnvironmentFault(
            "`gpuyard top` needs textual, which gpuyard's extra `top` installs",
            hint=f"install it with: {find_installation().with_extra('top')}",
        ) from error
    from gpuyard.ui.tui.terminal_text import has_colour, has_unicode

    request("GET", "/status")  # restarts or reports an older daemon before the screen opens
    if not has_colour(os.environ):
        os.environ["NO_COLOR"] = "1"
    Top(is_unicode=has_unicode(os.environ, sys.stdout.encoding or "")).run()
    return 0


COMMANDS = {"watch": Command(WATCH, _run_watch), "top": Command(TOP, _run_top)}
