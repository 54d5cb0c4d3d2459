"""The pace of a batch: when its next run may start, by the recent load and memory use of the machine.

- A gate closes as soon as its smoothed figure exceeds its limit, and reopens after `steady_s` seconds within. Memory is
  judged by the worse of its current and its smoothed figure. A figure that no probe can read closes no gate.
- The expected use of runs that have started counts until it shows. The memory of the next run counts as well where
  other work is present: a limit is exceeded because other work grows, never because of one more run.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.model.lease import Need, UncertainMemory
from gpuyard.model.machine_snapshot import Device, Snapshot
from gpuyard.policy.device_state import DeviceState
from gpuyard.policy.foreign_load import Smoothed, SteadyGate, judge_steadily, smooth
from gpuyard.policy.machine import tolerated_foreign_mb
from gpuyard.policy.wait_reasons import Reason, ReasonKind, over

if TYPE_CHECKING:
    from gpuyard.model.job_spec import BatchPace


class GateFigure(Struct, frozen=True, kw_only=True):
    """A figure and its gate."""

    now: float | None = None  # as last read
    smoothed: Smoothed = Smoothed()
    seen: float | None = None  # the figure that closes the gate
    judged: float | None = None  # `seen` with the expected use of runs; has to be within the limit for a start
    gate: SteadyGate = SteadyGate()


class PaceState(Struct, frozen=True, kw_only=True):
    """The gates of a batch: figures of the host, and of each device by its id."""

    sampled_at: float | None = None  # when the last snapshot was taken
    launched_at: float | None = None  # when the last run of this batch started; `any_launched_at`: of any batch
    any_launched_at: float | None = None
    running: int = 0  # the number of its runs that have not ended; the largest of them holds `run_vram_mb` of a device
    run_vram_mb: float = 0.0
    cpu: GateFigure = GateFigure()
    memory: GateFigure = GateFigure()
    device_loads: Mapping[str, GateFigure] = {}
    device_memory: Mapping[str, GateFigure] = {}


class ExpectedUse(Struct, frozen=True, kw_only=True):
    """Use that is not measured yet."""

    unshown_mb: float = 0.0  # RAM that running runs have not taken yet
    run_mb: float = 0.0  # RAM that one more run would take
    run_vram_mb: float = 0.0  # memory of a device that one more run would take
    cpu_percent: float = 0.0  # load that the average does not show yet
    loads: Mapping[str, float] = {}  # the same of each device, by its id


def update_pace(
    before: PaceState, pace: "BatchPace", snapshot: Snapshot, expected: ExpectedUse, now: float
) -> PaceState:

    def smoothed(figure: GateFigure | None, reading: float | None) -> tuple[GateFigure, float | None]:
        figure = figure or GateFigure()
        average = smooth(figure.smoothed, reading, now, pace.smoothing_s)
        return replace(figure, now=reading, smoothed=average), average.value

    def load(figure: GateFigure | None, reading: float | None, percent: float, limit: float | None) -> GateFigure:
        figure, seen = smoothed(figure, reading)
        gate = judge_steadily(figure.gate, _is_at_most(seen, limit), now, pace.steady_s)
        return replace(figure, seen=seen, judged=None if seen is None else min(100.0, seen + percent), gate=gate)

    def device_memory(device: Device) -> GateFigure:
        figure, average = smoothed(before.device_memory.get(device.id), device.known_used_mb)
        most = max((each for each in (average, figure.now) if each is not None), default=None)
        gate = judge_steadily(figure.gate, _is_at_most(most, pace.max_gpu_memory_mb), now, pace.steady_s)
        return replace(figure, seen=most, judged=most, gate=gate)

    host, devices = snapshot.host, snapshot.usable_devices()
    memory, average = smoothed(before.memory, host.memory_available_mb)
    least = min((each for each in (average, memory.now) if each is not None), default=None)
    reserved = expected.unshown_mb + (expected.run_mb if before.running else 0.0)
    gate = judge_steadily(memory.gate, _is_at_most(pace.min_free_memory_mb, least), now, pace.steady_s)
    loads, most_percent = before.device_loads, pace.max_gpu_percent
    return replace(
        before,
        sampled_at=snapshot.taken_at,
        run_vram_mb=expected.run_vram_mb,
        cpu=load(before.cpu, host.cpu_percent, expected.cpu_percent, pace.max_cpu_percent),
        memory=replace(memory, seen=least, judged=None if least is None else least - reserved, gate=gate),
        device_loads={
            each.id: load(loads.get(each.id), each.utilization_percent, expected.loads.get(each.id, 0.0), most_percent)
            for each in devices
        },
        device_memory={each.id: device_memory(each) for each in devices},
    )


def unreadable_bounds(pace: "BatchPace", state: PaceState, *, has_devices: bool) -> Iterator[str]:
    """Yield the options whose limit cannot be enforced, because no probe reads the figure. A batch with devices, none
    of which is present at the moment, waits for them instead."""
    if pace.max_cpu_percent is not None and state.cpu.judged is None:
        yield "--max-cpu"
    if pace.min_free_memory_mb is not None and state.memory.judged is None:
        yield "--min-free-mem-mb"
    if has_devices and not state.device_loads:
        return
    if pace.max_gpu_percent is not None and all(each.judged is None for each in state.device_loads.values()):
        yield "--max-gpu"
    if pace.max_gpu_memory_mb is not None and all(each.judged is None for each in state.device_memory.values()):
        yield "--max-gpu-mem-mb"


def why_unread(option: str, silent: str | None) -> str:
    """Return why the limit is not enforced. `silent` says which probe of GPUs did not answer, if one did not."""
    return silent if silent and option.startswith("--max-gpu") else "no probe measures it"


def waits_for_a_sample(state: PaceState, now: float) -> bool:
    """Return whether the last sample is older than the last start of a run."""
    # A start in the future comes from a clock that was set back since; to wait for it might take hours.
    starts = [at for at in (state.launched_at, state.any_launched_at) if at is not None and at <= now]
    return state.sampled_at is not None and bool(starts) and state.sampled_at <= max(starts)


def load_refusals(pace: "BatchPace", state: PaceState, now: float) -> Iterator[Reason]:
    """Yield which gates of the host are closed, so that no run may start now on any device."""
    if state.cpu.gate.is_closed or _is_at_most(state.cpu.judged, pace.max_cpu_percent) is False:
        reason = over(ReasonKind.HOST_TOO_BUSY, state.cpu.seen, pace.max_cpu_percent)
        yield _too_busy(reason, state.cpu, pace, now)
    memory, limit = state.memory, pace.min_free_memory_mb or 0.0
    if memory.gate.is_closed or _is_at_most(pace.min_free_memory_mb, memory.judged) is False:
        seen, judged = memory.seen or 0.0, memory.judged or 0.0
        text = f"{judged:.0f} MB of RAM left ({seen - judged:.0f} MB reserved for runs)"
        if memory.gate.is_closed:
            text = f"{seen:.0f} MB of RAM available"
        had = memory.seen if memory.gate.is_closed else memory.judged
        reason = Reason(ReasonKind.HOST_TOO_FULL, f"{text} < {limit:.0f} MB", had=had, needed=limit)
        yield _with_steady_time(reason, memory, pace, now)


def stagger_refusal(what: str, stagger_s: float, last: float | None, now: float) -> Reason | None:
    """Return why the next of these, such as `runs`, may not start yet: too little time has passed since the last."""
    # A last start in the future comes from a clock that was set back: ignore it.
    if last is None or not last <= now < last + stagger_s:
        return None
    text = f"{what} start {stagger_s:g} s apart, the next one in {last + stagger_s - now:.1f} s"
    return Reason(ReasonKind.STAGGERED, text)


def watches(need: Need, device_id: str) -> bool:
    """Return whether the gates of runs without devices of their own watch this device."""
    return device_id not in need.banned and (need.only is None or device_id in need.only)


def watched_device_refusals(pace: "BatchPace", state: PaceState, need: Need, now: float) -> Iterator[Reason]:
    """Yield why no run without devices may start now. It may use any, so all watched ones must be within limits."""
    for device_id in state.device_loads:
        if watches(need, device_id) and (reason := _gate_refusal(pace, state, device_id, now)) is not None:
            yield reason


def device_refusal(pace: "BatchPace", state: PaceState, device: DeviceState, need: Need, now: float) -> Reason | None:
    """Return why no run may start on this device now, or None."""
    device_id = device.device.id
    closed = _gate_refusal(pace, state, device_id, now)
    if closed is not None:
        return closed
    charged, limit = _charged_mb(device, need, state), pace.max_gpu_memory_mb
    if limit is None or charged is None or charged <= limit + 1e-6:
        return None
    text = f"GPU memory {charged:.0f} MB, including reservations and one more run, > {limit:.0f} MB"
    return Reason(ReasonKind.TOO_FULL, text, device_id, charged, limit)


def _gate_refusal(pace: "BatchPace", state: PaceState, device_id: str, now: float) -> Reason | None:
    load = state.device_loads.get(device_id, GateFigure())
    memory = state.device_memory.get(device_id, GateFigure())
    if load.gate.is_closed or _is_at_most(load.judged, pace.max_gpu_percent) is False:
        return _too_busy(over(ReasonKind.TOO_BUSY, load.seen, pace.max_gpu_percent, device_id), load, pace, now)
    if memory.gate.is_closed:
        reason = over(ReasonKind.TOO_FULL, memory.seen, pace.max_gpu_memory_mb, device_id)
        return _with_steady_time(reason, memory, pace, now)
    return None


def _charged_mb(device: DeviceState, need: Need, state: PaceState) -> float | None:
    """Return what is used and reserved on a device, with one more run (if unknown, as the largest of its batch) unless
    that is the first there: a limit below its need would keep it out for ever."""
    charged = device.charged_mb
    if charged is None:
        return None
    is_first = not device.lease_count and charged <= tolerated_foreign_mb(device.device)
    if is_first or need.is_exclusive:
        return charged
    return charged + (state.run_vram_mb if isinstance(need.memory, UncertainMemory) else need.required_mb or 0.0)


def unshown_percent(load_percent: float, age_s: float, smoothing_s: float) -> float:
    """Return how much of a load that began `age_s` ago the average does not show yet."""
    return float(load_percent * 0.5 ** (max(0.0, age_s) / smoothing_s)) if smoothing_s > 0 else 0.0


def _is_at_most(low: float | None, high: float | None) -> bool | None:
    return None if low is None or high is None else low <= high


def _too_busy(reason: Reason, figure: GateFigure, pace: "BatchPace", now: float) -> Reason:
    """Return `reason`, that of the gate; where the gate is open, that of the load with runs that have just started."""
    if figure.gate.is_closed:
        return _with_steady_time(reason, figure, pace, now)
    expected = over(reason.kind, figure.judged, reason.needed, reason.device_id)
    return replace(expected, text=f"{expected.text} (including runs that have just started)")


def _with_steady_time(reason: Reason, figure: GateFigure, pace: "BatchPace", now: float) -> Reason:
    """Add, for a figure that is within its limit again, how long it has been so."""
    since = figure.gate.within_since
    if since is None:
        return reason
    text = reason.text.replace(" > ", " <= ").replace(" < ", " >= ")
    return replace(reason, text=f"{text} for {max(0.0, now - since):.0f} s of {pace.steady_s:g} s")
