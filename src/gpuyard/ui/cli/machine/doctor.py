"""`gpuyard doctor`: which probes and engines work, and how to fix those that do not; replay of saved outputs."""

import os
import platform
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from gpuyard import __version__
from gpuyard.client import paths
from gpuyard.client.daemon_liveness import running_pid
from gpuyard.client.queue_host import QueueElsewhere, known_hosts, refuse_other_machine
from gpuyard.config import config_dir, config_fault, lease_dir, load_config
from gpuyard.engines.containers import installed_tools
from gpuyard.engines.local.job_cgroups import find_delegated
from gpuyard.engines.open_cluster_engine import Checked, check_cluster_nodes, check_engines
from gpuyard.errors import EnvironmentFault, GpuyardError, ProbeError, UserError
from gpuyard.ledger.directory_in_use import check_directory
from gpuyard.ledger.ledger import Ledger, LedgerContents
from gpuyard.ledger.ledger_mutex import hold_mutex
from gpuyard.ledger.neighbours import describe, find_neighbours
from gpuyard.model.lease import Drain
from gpuyard.model.machine_snapshot import Device, Host, IssueKind, Snapshot, Vendor, snapshot_as_dict
from gpuyard.model.option import Option
from gpuyard.model.units import format_count, format_size
from gpuyard.policy.device_health import closed_devices, describe_drain, device_issues
from gpuyard.policy.device_names import banned_ids
from gpuyard.policy.disk_and_system_limits import CONFIGURED, disk_reason
from gpuyard.policy.wait_reasons import ReasonKind
from gpuyard.probes.disk_watch import read_disk_in_time
from gpuyard.probes.fallback_chain import Checkup, check_probes
from gpuyard.probes.kernel_files import gpus_on_pci
from gpuyard.probes.local_machine import TOOLS, local_probes, replay
from gpuyard.schema.machine import drain_row
from gpuyard.system.user_directories import find_state_directory
from gpuyard.ui.cli.command_grammar import DEADLINE, JSON, Arguments, Command, Typed, Verb, unknown_word
from gpuyard.ui.cli.machine.devices import health_lines
from gpuyard.ui.cli.terminal import frame, paint, say, say_json, say_lines, terminal_size, tolerate_config_faults
from gpuyard.ui.cli.text_table import GAP, Column, join_cells, lay_out
from gpuyard.ui.views.machine_tables import ignored_texts, snapshot_lines

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def run(typed: Typed) -> int:
    values = typed.values()
    if values["engine"] is not None:
        return _check_cluster(values["engine"], as_json=typed.flag("json"))
    tolerate_config_faults()
    checks = check_probes(local_probes(), values["deadline"])
    plugged = gpus_on_pci()
    engines = list(check_engines())
    contents = _read_ledger()
    devices: dict[str, Device] = {}
    for check in checks:
        for device in check.devices or ():
            devices.setdefault(device.id, device)
    seen = Snapshot(taken_at=None, host=Host(), devices=tuple(devices.values()))
    # A lost GPU has its own line already.
    faults, alarms = (
        health_lines({name: [each for each in found if each.is_fault is is_fault and each.kind is not IssueKind.LOST]
                      for name, found in device_issues(seen, contents.health_marks).items()}, seen)
        for is_fault in (True, False)
    )  # fmt: skip
    notices = [*_closed_texts(seen, contents.drains), *ignored_texts(contents.bad), *ram_limit_notices()]
    notices += [*suspend_notices(checks), *alarms]
    advice = [*find_advice(checks, plugged), *faults] + [
        str(each.problem) for each in engines if each.problem and not (each.is_absent or each.is_unreachable)
    ]
    folders, folder_advice = _check_folders()
    advice += [*_ledger_advice(), *folder_advice, *filter(None, [config_fault()])]
    neighbours = find_neighbours(lease_dir())
    notices += filter(None, [describe(neighbours, lease_dir())])
    if typed.flag("json"):
        drains = [to_builtins(drain_row(drain)) for drain in contents.drains]
        others = [{name: getattr(each, name) for name in ("uid", "user", "pid", "directory")} for each in neighbours]
        more = {"ignored_records": to_builtins(contents.bad), "drains": drains, "folders": folders}
        say_json({**_report(checks, plugged, engines, advice), **more, "neighbours": others})
    else:
        _print_report(checks, engines, advice, notices, _folder_lines(folders))
    return 1 if advice else 0


def _run_replay(typed: Typed) -> int:
    tool, path = typed.arguments
    if tool not in TOOLS:
        raise unknown_word(f"there is no tool '{tool}'", tool, TOOLS)
    try:
        content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        snapshot = replay(tool, content)
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror}") from error
    except ProbeError as error:
        raise UserError(f"{path} cannot be read as {tool}: {error.message}") from error
    if typed.flag("json"):
        say_json(snapshot_as_dict(snapshot))
    else:
        say_lines(snapshot_lines(snapshot, frame()))
    return 0


def find_advice(checks: list[Checkup], plugged: dict[str, Vendor]) -> list[str]:
    readable = {check.vendor for check in checks if check.devices}
    unreadable = [(bus_id, vendor) for bus_id, vendor in plugged.items() if vendor not in readable]
    advice = []
    for bus_id, vendor in unreadable:
        probes = [check for check in checks if check.vendor is vendor]
        missing = [each.probe for each in probes if any(problem.kind == "missing" for problem in each.problems)]
        text = f"; missing: {', '.join(missing)}" if missing else ""
        advice.append(f"{vendor} GPU at {bus_id}: no probe can read it{text}")
    for check in checks:
        advice += [f"{device.name or device.id} is unhealthy: {device.fault}"
                   for device in check.devices or () if not device.healthy]  # fmt: skip
        if check.vendor not in readable:
            advice += [str(problem) for problem in check.problems if problem.kind != "missing"]
    return list(dict.fromkeys(advice))


def _read_ledger() -> LedgerContents:
    """Return the lease directory's content. Ignored files are no fault of this machine: any user can make them."""
    folder = lease_dir()
    try:
        return Ledger(folder).contents() if folder.is_dir() else LedgerContents()
    except (EnvironmentFault, OSError):
        return LedgerContents()  # commands that need the directory say so


def _closed_texts(seen: Snapshot, drains: Sequence[Drain]) -> list[str]:
    config, names = load_config().devices, {device.id: device.name for device in seen.devices}
    closed = closed_devices(seen, drains, config.banned_ids(seen))
    lines = [f"GPU {seen.label(each)} ({names[each] or each}) is {reason.text}"
             for each, reason in closed.items() if reason.kind is not ReasonKind.UNHEALTHY]  # fmt: skip
    lines += [f"{drain.device_id} (not found on this machine) is {describe_drain(drain)}"
              for drain in drains if drain.device_id not in names]  # fmt: skip
    unmatched = [str(name) for name in config.banned if not banned_ids([name], (), seen)]
    lines += [f"[devices] banned names {name}, but this machine has no such GPU" for name in unmatched]
    return lines


def _ledger_advice() -> list[str]:
    """Return who keeps the lease directory locked, or why nothing can be leased in it."""
    folder = lease_dir()
    try:
        if folder.is_dir():
            with hold_mutex(folder, 2.0):
                check_directory(folder)
    except EnvironmentFault as error:
        return [f"{error}: {error.hint}"]
    except OSError:
        pass  # commands that need the directory say so
    return []


def _settings() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("GPUYARD_")}


def _report(
    checks: list[Checkup], plugged: dict[str, Vendor], engines: list[Checked], advice: list[str]
) -> dict[str, Any]:
    return {
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "settings": _settings(),
        "probes": [
            {
                "vendor": str(check.vendor),
                "name": check.probe,
                "works": check.devices is not None,
                "devices": None if check.devices is None else len(check.devices),
                "seconds": round(check.seconds, 4),
                "problems": to_builtins(check.problems),
            }
            for check in checks
        ],
        "pci": [{"bus_id": bus_id, "vendor": str(vendor)} for bus_id, vendor in plugged.items()],
        "engines": [{"name": each.name, "works": each.problem is None, "problem": each.problem} for each in engines],
        "container_tools": installed_tools(),
        "advice": advice,
        "healthy": not advice,
    }


def _print_report(
    checks: list[Checkup], engines: list[Checked], advice: list[str], notices: list[str], folders: list[str]
) -> None:
    say(f"gpuyard {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    say(*folders)
    say(*(f"{name}={value}" for name, value in _settings().items()))
    rows = [(str(check.vendor), check.probe, *_probe_result(check)) for check in checks]
    for engine in engines:
        style = "green" if engine.problem is None else "dim" if engine.is_absent else "yellow"
        rows.append(("engines", engine.name, engine.problem or "works", style))
    configured, tools = load_config().containers.tool, installed_tools()
    for tool in tools:
        is_used = tool == (tools[0] if configured == "auto" else configured)
        rows.append(("containers", tool, *(("used for --image", "green") if is_used else ("installed", "dim"))))
    _print_results(rows)
    say(*(f"{paint('!', 'yellow')} {line}" for line in [*advice, *notices]))
    if not advice:
        found = any(check.devices for check in checks)
        say("No problems found." if found else "No problems found. No GPU is plugged in.")


def _print_results(rows: list[tuple[str, str, str, str]]) -> None:
    """Print vendor, probe and result of each row, the result wrapped to the terminal; repeated vendors are blank."""
    befores = ["", *(row[0] for row in rows)]
    names = [("" if row[0] == before else row[0], row[1]) for before, row in zip(befores, rows, strict=False)]
    heading, *lines = lay_out((Column("vendor"), Column("probe")), names, None)
    say(paint(join_cells([*heading, "result"]), "dim"))
    margin, width = len(GAP.join(heading)) + len(GAP), terminal_size()[0]
    for cells, (_, _, result, style) in zip(lines, rows, strict=True):
        first, *others = [result] if width is None else textwrap.wrap(result, max(20, width - margin)) or [""]
        say(f"{GAP.join(cells)}{GAP}{paint(first, style)}")
        say(*(f"{' ' * margin}{paint(line, style)}" for line in others))


def _probe_result(check: Checkup) -> tuple[str, str]:
    notes = [f"{problem.message}{f' ({problem.hint})' if problem.hint else ''}" for problem in check.problems]
    if check.devices is not None:
        works = f"works: {format_count(len(check.devices), 'device')} in {check.seconds * 1000:.1f} ms"
        return "; ".join([works, *notes]), "green"
    is_absent = all(problem.kind == "missing" for problem in check.problems)
    return "; ".join(notes), "dim" if is_absent else "yellow"


def _check_folders() -> tuple[dict[str, Any], list[str]]:
    """Return the folders in use with the reasons, the other machines that have a queue, and problems with them."""
    found: dict[str, Any] = {"configuration": str(config_dir())}
    try:
        place = find_state_directory()
        found |= {"state": place.path, "instead_of": None, "why": None, "file_system": place.kind}
        if place.problem is not None:
            found |= {"instead_of": place.wanted, "why": place.problem}
        found["other_hosts"] = [
            {"host": each.host, "state": each.state} for each in known_hosts(place.wanted) if not each.is_here
        ]
        found["leases"] = str(lease_dir())
        figure, least_mb = read_disk_in_time(place.path), load_config().host.min_free_disk_mb
        found["disk"] = {"free_mb": figure.free_mb, "total_mb": figure.total_mb, "min_free_mb": least_mb}
        refuse_other_machine(place.path)
    except QueueElsewhere as error:
        return found, [f"{error}: {error.hint}"]
    except GpuyardError as error:
        return found, [f"{error}{f' ({error.hint})' if error.hint else ''}"]
    reason = disk_reason(figure, least_mb, "the disk of the queue", CONFIGURED)
    if reason is None:
        return found, []
    return found, [f"no job starts: {reason.text}{f' ({reason.remedy})' if reason.remedy else ''}"]


def _folder_lines(folders: dict[str, Any]) -> list[str]:
    if "state" not in folders:
        return []
    why = f", in place of {folders['instead_of']}: {folders['why']}" if folders["why"] else ""
    kind = f" ({folders['file_system']})" if folders["file_system"] and not why else ""
    others = [f"another queue of yours: on {each['host']}, {each['state']}" for each in folders["other_hosts"]]
    disk, free = folders.get("disk") or {"free_mb": None}, ""
    if disk["free_mb"] is not None:
        free = f", {format_size(disk['free_mb'])} of {format_size(disk['total_mb'])} free"
    return [f"queue: {folders['state']}{kind}{why}{free}", *others]


def ram_limit_notices() -> list[str]:
    """Return why the RAM that jobs declare cannot be enforced, if the configuration asks for that. The cgroup of the
    daemon decides, if it runs."""
    if not load_config().host.enforce_ram:
        return []
    pid = running_pid(paths.lock_path())
    try:
        find_delegated("self" if pid is None else str(pid))
    except EnvironmentFault as error:
        return [f"[host] enforce_ram has no effect: {error} ({error.hint})"]
    return []


def _check_cluster(engine: str, *, as_json: bool) -> int:
    checks = check_cluster_nodes(engine, Path(paths.state_folder()), os.getcwd())
    is_healthy = bool(checks) and not any(each.problems for each in checks)
    if as_json:
        say_json({"engine": engine, "nodes": to_builtins(checks), "healthy": is_healthy})
    else:
        for each in checks:
            cards = Counter(each.report.cards_mb if each.report is not None else ())
            some = "".join(f", {format_count(count, 'GPU')} of {format_size(mb)}" for mb, count in cards.items())
            fine = "" if each.problems else f" works{some}"
            say(f"{paint(each.node, 'red' if each.problems else 'green')}{fine}")
            say(*(f"  {paint('!', 'yellow')} {problem}" for problem in each.problems))
        say("No problems found." if is_healthy else "" if checks else f"{engine} has no nodes.")
    return 0 if is_healthy else 1


def suspend_notices(checks: Sequence[Checkup], huge_pages: Path = _HUGE_PAGES) -> list[str]:
    """Return what would make suspending faster here. Nothing without an NVIDIA GPU: only its driver suspends
    programs."""
    if not any(check.vendor is Vendor.NVIDIA and check.devices for check in checks):
        return []
    try:  # such as `always [madvise] never`, with the present choice in brackets
        chosen = huge_pages.read_text(encoding="ascii").partition("[")[2].partition("]")[0]
    except (OSError, UnicodeDecodeError):
        return []
    if chosen not in ("madvise", "never"):
        return []
    notice = (
        f"transparent huge pages are set to {chosen}: the driver moves GPU memory to RAM in small pages when a job is "
        "suspended, 20 GB in 9.8 to 13.7 s instead of 6.7 to 7.5 s (on an H200). "
        f"As root: echo always > {_HUGE_PAGES}"
    )
    return [notice]


VERB = Verb(
    """Check which probes and engines work, and say how to fix those that do not. Name lease files that are ignored, and
    users who lease the same GPUs in another directory.

    Exit status 1 if no probe can read a GPU that is plugged in, a GPU is unhealthy, an engine cannot be loaded, a
    process keeps the lease directory locked, or your queue uses another one.

    --engine checks on each node whether it sees the queue's folder, the Python of gpuyard and the working directory,
    its clock, and the memory of its GPUs. Exit status 1 if something is wrong there.
    """,
    (
        Option("engine", "choice", "[slurm|ray]", "Only run a job on every node of this cluster, and check it.",
               choices=("slurm", "ray")),
        JSON,
        DEADLINE,
    ),
    commands={
        "replay": Command(
            Verb(
                f"""Parse a saved output of TOOL as the probe does.

                TOOL is one of: {" ".join(TOOLS)}. FILE may be - for standard input.
                """,
                (JSON,),
                Arguments("TOOL FILE", most=2),
            ),
            _run_replay,
        )
    },
)  # fmt: skip
