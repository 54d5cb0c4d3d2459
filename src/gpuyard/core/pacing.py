"""The pace of a batch: when its next run may start, by how busy and how full the machine has been of late.

- How busy the CPU and a device are is judged smoothed, so that one spike or one lull decides nothing. How full memory
  is, is judged by the worse of now and of late.
- A gate closes as soon as its figure is beyond its bound, and opens again once it has been within for `steady_s`
  without a break. What no probe can read closes nothing.
- What runs that have started will take counts before it shows. So does the next run itself where others of its batch
  are at work already: then it is left to them to end, and not to one run more to go beyond a bound.
- Runs, of whatever batch, start one at a time, each by a look at the machine that was taken after the one before it had
  started.
"""

import math
from collections.abc import Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.core.gates import Smoothed, SteadyGate, judge_steadily, smooth
from gpuyard.core.model import Device, Need, Snapshot
from gpuyard.core.reasons import Reason, ReasonKind, over, plain
from gpuyard.core.room import Room

DEFAULT_SMOOTHING_S = 5.0
DEFAULT_STEADY_S = 3.0
_ROUNDING_MB = 1e-6


class Pace(Struct, frozen=True, kw_only=True):
    """What a batch asks for. A bound that is `None` does not apply. `run_ram_mb` is what a run takes of RAM, where that
    is not left to be learned; launches are at least `stagger_s` apart; `sample_log` is a file to write figures to."""

    max_cpu_percent: float | None = None
    min_free_memory_mb: float | None = None
    max_gpu_percent: float | None = None
    max_gpu_memory_mb: float | None = None
    run_ram_mb: float | None = None
    smoothing_s: float = DEFAULT_SMOOTHING_S
    steady_s: float = DEFAULT_STEADY_S
    stagger_s: float = 0.0
    sample_log: str | None = None


class Figure(Struct, frozen=True, kw_only=True):
    """As it was last read, smoothed, and the gate that goes by it; `judged` is what the gate went by."""

    now: float | None = None
    smoothed: Smoothed = Smoothed()
    judged: float | None = None
    gate: SteadyGate = SteadyGate()


class Standing(Struct, frozen=True, kw_only=True):
    """How the gates of a batch stand: its figures of the host, and of each device by its id. Its last run started at
    `launched_at`; `at_work` of its runs have not ended. The last run of any batch started at `others_at`."""

    looked_at: float | None = None
    launched_at: float | None = None
    others_at: float | None = None
    at_work: int = 0
    cpu: Figure = Figure()
    memory: Figure = Figure()
    loads: Mapping[str, Figure] = {}
    full: Mapping[str, Figure] = {}


class Coming(Struct, frozen=True, kw_only=True):
    """RAM that is as good as taken: what runs at work have not taken yet, and what one run more would take."""

    unshown_mb: float = 0.0
    run_mb: float = 0.0


def follow(before: Standing, pace: Pace, snapshot: Snapshot, coming: Coming, now: float) -> Standing:
    """The standing by one more look."""
    host, half_life_s = snapshot.host, pace.smoothing_s
    cpu = _smoothed(before.cpu, host.cpu_percent, now, half_life_s)
    memory = _smoothed(before.memory, host.memory_available_mb, now, half_life_s)
    ours = coming.unshown_mb + (coming.run_mb if before.at_work else 0.0)
    least = min((each for each in (memory.judged, memory.now) if each is not None), default=None)
    left = None if least is None else least - ours
    devices = snapshot.usable_devices()
    return replace(
        before,
        looked_at=snapshot.taken_at,
        cpu=_judged(cpu, _is_within(cpu.judged, pace.max_cpu_percent), now, pace),
        memory=_judged(replace(memory, judged=left), _is_enough(left, pace.min_free_memory_mb), now, pace),
        loads={device.id: _load(before, device, pace, now) for device in devices},
        full={device.id: _full(before, device, pace, now) for device in devices},
    )


def unknown_figures(pace: Pace, standing: Standing, *, has_devices: bool) -> Iterator[str]:
    """Bounds that nobody can keep, as no probe gives the figure, by what the command line calls them. A batch that has
    devices, of which none is there at the moment, waits for them to come back."""
    if pace.max_cpu_percent is not None and standing.cpu.judged is None:
        yield "--max-cpu"
    if pace.min_free_memory_mb is not None and standing.memory.judged is None:
        yield "--min-free-mem-mb"
    if has_devices and not standing.loads:
        return
    if pace.max_gpu_percent is not None and all(each.judged is None for each in standing.loads.values()):
        yield "--max-gpu"
    if pace.max_gpu_memory_mb is not None and all(each.judged is None for each in standing.full.values()):
        yield "--max-gpu-mem-mb"


def refusals(pace: Pace, standing: Standing, now: float) -> Iterator[Reason]:
    """Why no run may start now, wherever it would go."""
    own, others = (
        at if at is not None and at <= now else -math.inf for at in (standing.launched_at, standing.others_at)
    )
    next_at = own + pace.stagger_s
    if now < next_at:
        text = f"runs start {pace.stagger_s:g} s apart, the next one in {next_at - now:.1f} s"
        yield plain(ReasonKind.STAGGERED, text)
    elif standing.looked_at is not None and standing.looked_at <= max(own, others):
        yield plain(ReasonKind.STAGGERED, "a run has just started, and nobody has looked since")
    if standing.cpu.gate.is_closed:
        bound = pace.max_cpu_percent or 0.0
        yield _told(over(ReasonKind.HOST_TOO_BUSY, standing.cpu.judged, bound), standing.cpu, pace, now)
    if standing.memory.gate.is_closed:
        yield _told(_short_of_memory(pace, standing.memory), standing.memory, pace, now)


def _not_after(now: float, at: float | None) -> float:
    """Where the clock was set back since, to wait until it is there again might take hours."""
    return at if at is not None and at <= now else -math.inf


def device_refusal(pace: Pace, standing: Standing, room: Room, need: Need, now: float) -> Reason | None:
    """Why no run may start on this device now."""
    device_id = room.device.id
    load, full = standing.loads.get(device_id, Figure()), standing.full.get(device_id, Figure())
    if load.gate.is_closed:
        reason = over(ReasonKind.TOO_BUSY, load.judged, pace.max_gpu_percent, device_id)
        return _told(reason, load, pace, now)
    if full.gate.is_closed:
        reason = over(ReasonKind.TOO_FULL, full.judged, pace.max_gpu_memory_mb, device_id)
        return _told(reason, full, pace, now)
    charged, bound = _charged_mb(room, need), pace.max_gpu_memory_mb
    if bound is None or charged is None or charged <= bound + _ROUNDING_MB:
        return None
    text = f"GPU memory {charged:.0f} MB, with what is reserved and one run more, > {bound:.0f} MB"
    return Reason(kind=ReasonKind.TOO_FULL, text=text, device_id=device_id, had=charged, needed=bound)


def _charged_mb(room: Room, need: Need) -> float | None:
    """What is used and reserved of a device, with one more run if it is not the first there."""
    if room.free_mb is None or room.capacity_mb is None:
        return None
    is_known = need.memory_mb is not None and not need.is_exclusive and not need.takes_rest
    return room.capacity_mb - room.free_mb + (need.memory_mb or 0.0 if is_known and room.takers else 0.0)


def _smoothed(before: Figure, reading: float | None, now: float, half_life_s: float) -> Figure:
    average = smooth(before.smoothed, reading, now, half_life_s)
    return replace(before, now=reading, smoothed=average, judged=average.value)


def _judged(figure: Figure, is_within: bool | None, now: float, pace: Pace) -> Figure:  # noqa: FBT001
    return replace(figure, gate=judge_steadily(figure.gate, is_within, now, pace.steady_s))


def _load(before: Standing, device: Device, pace: Pace, now: float) -> Figure:
    known = before.loads.get(device.id, Figure())
    figure = _smoothed(known, device.utilization_percent, now, pace.smoothing_s)
    return _judged(figure, _is_within(figure.judged, pace.max_gpu_percent), now, pace)


def _full(before: Standing, device: Device, pace: Pace, now: float) -> Figure:
    known = before.full.get(device.id, Figure())
    figure = _smoothed(known, device.memory_used_mb, now, pace.smoothing_s)
    if figure.judged is not None:
        figure = replace(figure, judged=max(figure.judged, figure.now or 0.0))
    return _judged(figure, _is_within(figure.judged, pace.max_gpu_memory_mb), now, pace)


def _is_within(figure: float | None, bound: float | None) -> bool | None:
    return None if figure is None or bound is None else figure <= bound


def _is_enough(figure: float | None, bound: float | None) -> bool | None:
    return None if figure is None or bound is None else figure >= bound


def _short_of_memory(pace: Pace, figure: Figure) -> Reason:
    had, bound = figure.judged or 0.0, pace.min_free_memory_mb or 0.0
    kept = (figure.now or 0.0) - had
    less = f" ({kept:.0f} MB of it kept for runs)" if kept >= 1.0 else ""
    text = f"{had:.0f} MB of RAM available{less} < {bound:.0f} MB"
    return Reason(kind=ReasonKind.HOST_TOO_FULL, text=text, had=had, needed=bound)


def _told(reason: Reason, figure: Figure, pace: Pace, now: float) -> Reason:
    """One whose figure is within again, but not for long enough yet, is told as such."""
    since = figure.gate.within_since
    if since is None:
        return reason
    what = reason.text.replace(" > ", " <= ").replace(" < ", " >= ")
    return replace(reason, text=f"{what} for {max(0.0, now - since):.0f} s of {pace.steady_s:g} s")
