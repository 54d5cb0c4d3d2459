"""`gpuyard devices`: every GPU and the host, and their load; `drain` and `undrain`: whether work starts on a GPU;
`clear`: after a repair."""

from collections.abc import Iterator, Mapping, Sequence

from msgspec import to_builtins

from gpuyard.config import load_config
from gpuyard.ledger.ledger import clear_devices, drain_devices, open_ledger, undrain_devices
from gpuyard.ledger.ledger_status import read_host_reserved
from gpuyard.model.lease import Need
from gpuyard.model.machine_snapshot import Snapshot, device_as_dict, snapshot_as_dict
from gpuyard.model.option import Option
from gpuyard.model.topology import topology_as_dict
from gpuyard.model.units import format_count
from gpuyard.policy.device_health import (
    HealthIssue,
    closed_devices,
    describe_drain,
    describe_issue,
    device_issues,
    drain_of,
)
from gpuyard.policy.device_names import choose_vendor
from gpuyard.policy.host_room import describe_reserved
from gpuyard.policy.wait_reasons import ReasonKind
from gpuyard.probes.devices_and_processes import describe_processes
from gpuyard.probes.kernel_files import vendors_on_pci
from gpuyard.probes.local_machine import snapshot as take_snapshot
from gpuyard.schema.machine import drain_row, issue_row
from gpuyard.ui.cli.ask_daemon import say_answer
from gpuyard.ui.cli.command_grammar import DEADLINE, JSON, Arguments, Command, Typed, Verb
from gpuyard.ui.cli.terminal import frame, paint, pids_of, say, say_json, say_lines, tolerate_config_faults
from gpuyard.ui.views.machine_tables import snapshot_lines, topology_lines


def run(typed: Typed) -> int:
    tolerate_config_faults()
    snapshot = take_snapshot(typed.values()["deadline"])
    if typed.flag("topology") and typed.flag("json"):
        found = topology_as_dict(snapshot.topology, [device.id for device in snapshot.unsplit_devices()])
        say_json({**found, "labels": dict(snapshot.labels)})
        return 0
    if typed.flag("topology"):
        say(*topology_lines(snapshot))
        return 0
    ledger, banned = open_ledger(), load_config().devices.banned_ids(snapshot)
    drains, issues = ledger.read_drains(), device_issues(snapshot, ledger.read_health_marks())
    reserved = read_host_reserved(ledger, snapshot)
    if typed.flag("json"):
        devices = [
            {
                **device_as_dict(device),
                "label": snapshot.labels.get(device.id),
                "drain": None if (drain := drain_of(device, drains)) is None else to_builtins(drain_row(drain)),
                "banned": device.id in banned,
                "issues": [to_builtins(issue_row(issue)) for issue in issues.get(device.id, ())],
            }
            for device in snapshot.devices
        ]
        say_json({**snapshot_as_dict(snapshot), "host_reserved": to_builtins(reserved), "devices": devices})
        return 0
    processes = describe_processes(pids_of(snapshot))
    say_lines(snapshot_lines(snapshot, frame(), expected=vendors_on_pci(), processes=processes))
    if reserved.leases:
        say(describe_reserved(reserved))
    if snapshot.is_mixed:
        preferred = load_config().devices.vendor
        need, _ = choose_vendor(Need(), snapshot.usable_devices(), snapshot, banned=banned, preferred=preferred)
        own = [snapshot.label(each.id) for each in snapshot.unsplit_devices() if each.is_integrated]
        note = f"; integrated graphics: {', '.join(own)}" if own else ""
        say(f"Programs get {need.vendor} GPUs unless they name others, with --vendor or --device{note}")
    for device_id, reason in closed_devices(snapshot, drains, banned).items():
        if reason.kind is not ReasonKind.UNHEALTHY:  # its line is below
            say(f"{paint('!', 'yellow')} GPU {snapshot.label(device_id)} is {reason.text}")
    say(*(f"{paint('!', 'yellow')} {line}" for line in health_lines(issues, snapshot)))
    return 0


def _run_clear(typed: Typed) -> int:
    snapshot = take_snapshot()
    ids = clear_devices(open_ledger(), typed.arguments, snapshot)
    lines = (f"GPU {snapshot.label(device_id)} is cleared: work starts there again" for device_id in ids)
    return say_answer(typed, {"cleared": ids}, *lines)


def health_lines(issues: Mapping[str, Sequence[HealthIssue]], snapshot: Snapshot) -> Iterator[str]:
    for device in snapshot.devices:
        if device.parent is None:
            for issue in issues.get(device.id, ()):
                yield f"GPU {snapshot.label(device.id)} is {describe_issue(issue)}; {issue.remedy}"


def drain(names: Sequence[str], typed: Typed) -> int:
    snapshot, ledger = take_snapshot(), open_ledger()
    drains = drain_devices(ledger, names, typed.text("reason") or "", snapshot)
    held = ledger.leases()
    lines = []
    for each in drains:
        parts = (each.device_id, *(device.id for device in snapshot.devices if device.parent == each.device_id))
        left = sum(any(lease.on(part) is not None for part in parts) for lease in held)
        label, still = snapshot.label(each.device_id), "it has no leases"
        if left:
            still = f"{format_count(left, 'lease')} on it continue{'s' if left == 1 else ''}"
        lines.append(f"GPU {label} is {describe_drain(each)}; {still}. `gpuyard devices undrain {label}` ends it")
    return say_answer(typed, {"drained": [to_builtins(drain_row(drain)) for drain in drains]}, *lines)


def undrain(names: Sequence[str], typed: Typed) -> int:
    snapshot = take_snapshot()
    ids = undrain_devices(open_ledger(), names, snapshot)
    lines = (f"GPU {snapshot.label(device_id)}: work starts there again" for device_id in ids)
    return say_answer(typed, {"undrained": ids}, *lines)


_DEVICES = Arguments("ID...", least=1, is_many=True)
COMMANDS = {
    "drain": Command(
        Verb(
            """Start nothing new on these GPUs; what runs there continues.

            It holds at once and until `gpuyard devices undrain`, also across restarts: for your queue, `gpuyard run`
            and your scripts, and for work that already waits. If users share the lease directory, a drain by its owner
            or by root holds for all of them. ID is a number or an id as in `gpuyard devices`.
            """,
            (Option("reason", "text", "TEXT", "Why; everyone who waits for the GPU sees it."), JSON),
            _DEVICES,
        ),
        lambda typed: drain(typed.arguments, typed),
    ),
    "undrain": Command(
        Verb("Let work start on these GPUs again.", (JSON,), _DEVICES), lambda typed: undrain(typed.arguments, typed)
    ),
    "clear": Command(
        Verb(
            """Let work start on GPUs that were faulty, after a repair.

            What is wrong with a GPU at this moment is accepted: it counts as faulty again when that gets worse. Faults
            that the driver no longer reports end by themselves.
            """,
            (JSON,),
            _DEVICES,
        ),
        _run_clear,
    ),
}
VERB = Verb(
    "Show every GPU and the host, their load, and whether work starts there.",
    (Option("topology", "flag", None, "Show how the GPUs are linked, and their NUMA nodes."), JSON, DEADLINE),
    commands=COMMANDS,
)
