"""The pace of a batch: when its next run may start, by how busy and how full the machine has been of late.

- How busy the CPU and a device are is judged smoothed, so that one spike or one lull decides nothing. How full memory
  is, is judged by the worse of now and of late.
- A gate closes as soon as its figure is beyond its bound, and opens again once it has been within for `steady_s`
  without a break. What no probe can read closes nothing.
- What runs that have started will take counts before it shows: memory until it is seen, load until the average has had
  the time to show it. Memory of the next run itself counts as well where others are there already: then it is left to
  them to end, and not to one run more to go beyond a bound.
- Runs, of whatever batch, start one at a time, each by a look at the machine that was taken after the one before it had
  started.
"""

import math
from collections.abc import Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.core.lease import Need
from gpuyard.core.scheduling.device_fit import allowed_strangers
from gpuyard.core.scheduling.device_memory import DeviceRoom
from gpuyard.core.scheduling.load_gates import Smoothed, SteadyGate, judge_steadily, smooth
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind, over, plain
from gpuyard.core.snapshot import Device, Snapshot

DEFAULT_SMOOTHING_S = 5.0
DEFAULT_STEADY_S = 3.0
_ROUNDING_MB = 1e-6


class BatchPace(Struct, frozen=True, kw_only=True):
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

    @property
    def gates_devices(self) -> bool:
        return self.max_gpu_percent is not None or self.max_gpu_memory_mb is not None


class GateFigure(Struct, frozen=True, kw_only=True):
    """As it was last read, and smoothed; `seen` is what its gate goes by, and `judged` what it comes to with what is as
    good as taken."""

    now: float | None = None
    smoothed: Smoothed = Smoothed()
    seen: float | None = None
    judged: float | None = None
    gate: SteadyGate = SteadyGate()


class PaceState(Struct, frozen=True, kw_only=True):
    """How the gates of a batch stand: its figures of the host, and of each device by its id. Its last run started at
    `launched_at`; `at_work` of its runs have not ended, and the largest of them holds `run_vram_mb` of a device.
    The last run of any batch started at `others_at`."""

    looked_at: float | None = None
    launched_at: float | None = None
    others_at: float | None = None
    at_work: int = 0
    run_vram_mb: float = 0.0
    cpu: GateFigure = GateFigure()
    memory: GateFigure = GateFigure()
    loads: Mapping[str, GateFigure] = {}
    full: Mapping[str, GateFigure] = {}


class ExpectedUse(Struct, frozen=True, kw_only=True):
    """What is as good as taken: RAM that runs at work have not taken yet and that one run more would take, memory of a
    device that one run more would take, and load that averages do not show yet, of the CPU and of each device by its
    id."""

    unshown_mb: float = 0.0
    run_mb: float = 0.0
    run_vram_mb: float = 0.0
    cpu_percent: float = 0.0
    loads: Mapping[str, float] = {}


def follow(before: PaceState, pace: BatchPace, snapshot: Snapshot, coming: ExpectedUse, now: float) -> PaceState:
    """The standing by one more look."""
    host = snapshot.host
    cpu = _smoothed(before.cpu, host.cpu_percent, pace, now)
    memory = _smoothed(before.memory, host.memory_available_mb, pace, now)
    least = min((each for each in (memory.seen, memory.now) if each is not None), default=None)
    kept = coming.unshown_mb + (coming.run_mb if before.at_work else 0.0)
    devices = snapshot.usable_devices()
    return replace(
        before,
        looked_at=snapshot.taken_at,
        run_vram_mb=coming.run_vram_mb,
        cpu=_gated(_with_more(cpu, coming.cpu_percent), _is_within(cpu.seen, pace.max_cpu_percent), pace, now),
        memory=_gated(
            replace(memory, seen=least, judged=None if least is None else least - kept),
            _is_enough(least, pace.min_free_memory_mb),
            pace,
            now,
        ),
        loads={device.id: _load(before, device, pace, coming, now) for device in devices},
        full={device.id: _full(before, device, pace, now) for device in devices},
    )


def unknown_figures(pace: BatchPace, standing: PaceState, *, has_devices: bool) -> Iterator[str]:
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


def refusals(pace: BatchPace, standing: PaceState, now: float) -> Iterator[Reason]:
    """Why no run may start now, wherever it would go."""
    # Where the clock was set back since, to wait until it is there again might take hours.
    own, others = (
        at if at is not None and at <= now else -math.inf for at in (standing.launched_at, standing.others_at)
    )
    next_at = own + pace.stagger_s
    if now < next_at:
        text = f"runs start {pace.stagger_s:g} s apart, the next one in {next_at - now:.1f} s"
        yield plain(ReasonKind.STAGGERED, text)
    elif standing.looked_at is not None and standing.looked_at <= max(own, others):
        yield plain(ReasonKind.STAGGERED, "a run has just started, and nobody has looked since")
    if standing.cpu.gate.is_closed or _is_within(standing.cpu.judged, pace.max_cpu_percent) is False:
        gate = over(ReasonKind.HOST_TOO_BUSY, standing.cpu.seen, pace.max_cpu_percent)
        yield _too_busy(gate, standing.cpu, pace, now)
    if standing.memory.gate.is_closed or _is_enough(standing.memory.judged, pace.min_free_memory_mb) is False:
        yield _short_of_memory(standing.memory, pace, now)


def watches(need: Need, device_id: str) -> bool:
    """Whether the gates of runs without devices of their own go by this device."""
    return device_id not in need.banned and (need.only is None or device_id in need.only)


def watched_refusals(pace: BatchPace, standing: PaceState, need: Need, now: float) -> Iterator[Reason]:
    """Why no run without devices of its own may start now. It may use any device that it finds, so all that it watches
    have to be within their bounds."""
    for device_id in standing.loads:
        if watches(need, device_id) and (reason := _gate_refusal(pace, standing, device_id, now)) is not None:
            yield reason


def device_refusal(pace: BatchPace, standing: PaceState, room: DeviceRoom, need: Need, now: float) -> Reason | None:
    """Why no run may start on this device now."""
    device_id = room.device.id
    closed = _gate_refusal(pace, standing, device_id, now)
    if closed is not None:
        return closed
    charged, bound = _charged_mb(room, need, standing), pace.max_gpu_memory_mb
    if bound is None or charged is None or charged <= bound + _ROUNDING_MB:
        return None
    text = f"GPU memory {charged:.0f} MB, with what is reserved and one run more, > {bound:.0f} MB"
    if need.takes_rest and standing.at_work and (room.free_mb or 0.0) <= 0:
        text = "GPU memory: a run has all of it until it is known how much it takes (--run-vram says it)"
    return Reason(kind=ReasonKind.TOO_FULL, text=text, device_id=device_id, had=charged, needed=bound)


def _gate_refusal(pace: BatchPace, standing: PaceState, device_id: str, now: float) -> Reason | None:
    load, full = standing.loads.get(device_id, GateFigure()), standing.full.get(device_id, GateFigure())
    if load.gate.is_closed or _is_within(load.judged, pace.max_gpu_percent) is False:
        return _too_busy(over(ReasonKind.TOO_BUSY, load.seen, pace.max_gpu_percent, device_id), load, pace, now)
    if full.gate.is_closed:
        return _steady(over(ReasonKind.TOO_FULL, full.seen, pace.max_gpu_memory_mb, device_id), full, pace, now)
    return None


def _charged_mb(room: DeviceRoom, need: Need, standing: PaceState) -> float | None:
    """What is used and reserved of a device, with one more run if it is not the first there: where nobody else is, a
    bound that is too tight would keep it out for ever. One of which nothing is known counts as the largest of its batch
    that is at work."""
    charged = room.charged_mb
    if charged is None:
        return None
    is_first = not room.takers and charged <= allowed_strangers(room.device)
    if is_first or need.is_exclusive or need.memory_mb is None:
        return charged
    return charged + (standing.run_vram_mb if need.takes_rest else need.memory_mb)


def unshown_percent(load_percent: float, age_s: float, smoothing_s: float) -> float:
    """How much of a load that began so long ago an average does not show yet."""
    return float(load_percent * 0.5 ** (max(0.0, age_s) / smoothing_s)) if smoothing_s > 0 else 0.0


def _smoothed(before: GateFigure, reading: float | None, pace: BatchPace, now: float) -> GateFigure:
    average = smooth(before.smoothed, reading, now, pace.smoothing_s)
    return replace(before, now=reading, smoothed=average, seen=average.value, judged=average.value)


def _with_more(figure: GateFigure, percent: float) -> GateFigure:
    return figure if figure.seen is None else replace(figure, judged=min(100.0, figure.seen + percent))


def _gated(figure: GateFigure, is_within: bool | None, pace: BatchPace, now: float) -> GateFigure:  # noqa: FBT001
    return replace(figure, gate=judge_steadily(figure.gate, is_within, now, pace.steady_s))


def _load(before: PaceState, device: Device, pace: BatchPace, coming: ExpectedUse, now: float) -> GateFigure:
    figure = _smoothed(before.loads.get(device.id, GateFigure()), device.utilization_percent, pace, now)
    figure = _with_more(figure, coming.loads.get(device.id, 0.0))
    return _gated(figure, _is_within(figure.seen, pace.max_gpu_percent), pace, now)


def _full(before: PaceState, device: Device, pace: BatchPace, now: float) -> GateFigure:
    figure = _smoothed(before.full.get(device.id, GateFigure()), device.memory_used_mb, pace, now)
    most = max((each for each in (figure.seen, figure.now) if each is not None), default=None)
    return _gated(replace(figure, seen=most, judged=most), _is_within(most, pace.max_gpu_memory_mb), pace, now)


def _is_within(figure: float | None, bound: float | None) -> bool | None:
    return None if figure is None or bound is None else figure <= bound


def _is_enough(figure: float | None, bound: float | None) -> bool | None:
    return None if figure is None or bound is None else figure >= bound


# In words


def _too_busy(reason: Reason, figure: GateFigure, pace: BatchPace, now: float) -> Reason:
    """`reason` is that of the gate; one that is open is overrun by what has just started."""
    if figure.gate.is_closed:
        return _steady(reason, figure, pace, now)
    told = over(reason.kind, figure.judged, reason.needed, reason.device_id)
    return replace(told, text=f"{told.text} (with what has just started)")


def _short_of_memory(figure: GateFigure, pace: BatchPace, now: float) -> Reason:
    bound = pace.min_free_memory_mb or 0.0
    if figure.gate.is_closed:
        text, had = f"{figure.seen or 0.0:.0f} MB of RAM available", figure.seen
    else:
        had = figure.judged
        text = f"{had or 0.0:.0f} MB of RAM left ({(figure.seen or 0.0) - (had or 0.0):.0f} MB are kept for runs)"
    reason = Reason(kind=ReasonKind.HOST_TOO_FULL, text=f"{text} < {bound:.0f} MB", had=had, needed=bound)
    return _steady(reason, figure, pace, now)


def _steady(reason: Reason, figure: GateFigure, pace: BatchPace, now: float) -> Reason:
    """One whose figure is within again, but not for long enough yet, is told as such."""
    since = figure.gate.within_since
    if since is None:
        return reason
    what = reason.text.replace(" > ", " <= ").replace(" < ", " >= ")
    return replace(reason, text=f"{what} for {max(0.0, now - since):.0f} s of {pace.steady_s:g} s")
