"""Pacer: the gates of batches, look by look; for how long each held a batch up; and what its sample log is told."""

import logging
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpuyard.control.live_jobs import Live
from gpuyard.control.transitions import JobTransitions
from gpuyard.core.sample import Sample
from gpuyard.core.scheduling.batch_pacing import (
    BatchPace,
    ExpectedUse,
    GateFigure,
    PaceState,
    unreadable_bounds,
    unshown_percent,
    update_pace,
    watches,
)
from gpuyard.core.scheduling.plan import Plan, Start
from gpuyard.core.scheduling.queue_order import Lane
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind
from gpuyard.core.snapshot import Device
from gpuyard.core.snapshot_json import iso_time

_log = logging.getLogger(__name__)
_NOTE_EVERY_S = 5.0
_FORGET_S = 60.0
_GATES = {
    ReasonKind.STAGGERED: "stagger",
    ReasonKind.ARRAY_LIMIT: "concurrency",
    ReasonKind.HOST_TOO_BUSY: "cpu",
    ReasonKind.HOST_TOO_FULL: "memory",
    ReasonKind.TOO_BUSY: "gpu",
    ReasonKind.FOREIGN_LOAD: "gpu",
    ReasonKind.TOO_FULL: "gpu-memory",
    ReasonKind.PAUSED: "pause",
}


class BatchGateState(Struct, frozen=True, kw_only=True):
    """What is kept of a batch: seconds for which each gate held its next run back, and bounds that nobody could keep
    as no probe gives the figure."""

    waits_s: dict[str, float] = {}
    unknown: tuple[str, ...] = ()


class GateSample(Struct, frozen=True, kw_only=True):
    """A line of a sample log: the host, and a device where there is one, as the gates saw them."""

    taken_at: str | None
    event: str
    job: int | None = None
    index: str | None = None
    device: str | None = None
    cpu_percent: float | None = None
    cpu_smoothed_percent: float | None = None
    cpu_judged_percent: float | None = None
    memory_available_mb: float | None = None
    memory_judged_mb: float | None = None
    gpu_percent: float | None = None
    gpu_smoothed_percent: float | None = None
    gpu_judged_percent: float | None = None
    gpu_memory_used_mb: float | None = None
    gpu_memory_judged_mb: float | None = None
    gpu_memory_charged_mb: float | None = None
    running: int = 0
    held_by: str | None = None


class _Kept:
    """One batch that has runs to start."""

    def __init__(self, pace: BatchPace, standing: PaceState, batch: BatchGateState) -> None:
        self.pace = pace
        self.standing = standing
        self.batch = batch
        self.held_by: Reason | None = None
        self.gate: str | None = None
        self.told_at = self.noted_at = 0.0
        self.logged_at: float | None = None


class BatchGates:
    """Kept in memory while a batch has runs to start; what must outlive us is in the store."""

    def __init__(self, transitions: JobTransitions) -> None:
        self._transitions = transitions
        self._kept: dict[int, _Kept] = {}
        self._rows: list[tuple[str, GateSample]] = []
        self._runs: dict[str, Live] = {}
        self._ended: list[tuple[float, Live]] = []

    @property
    def standings(self) -> dict[int, PaceState]:
        return {group: kept.standing for group, kept in self._kept.items()}

    @property
    def is_waiting(self) -> bool:
        """Whether a batch has runs to start: then somebody should look now and then, for its averages."""
        return bool(self._kept)

    def held_by(self, group: int) -> tuple[str, Reason] | None:
        kept = self._kept.get(group)
        return None if kept is None or kept.held_by is None or kept.gate is None else (kept.gate, kept.held_by)

    def batch(self, group: int) -> BatchGateState:
        kept = self._kept.get(group)
        return self._read(group) if kept is None else kept.batch

    def update(self, lanes: Iterable[Lane], sample: Sample, now: float) -> None:
        """Brings the standings of all that have runs to start up to date."""
        waiting = {lane.group: lane for lane in lanes if lane.pace is not None and lane.group is not None}
        if not waiting and not self._kept:
            return
        self._let_go(self._kept.keys() - waiting.keys())
        self._note_ends(now)
        running, any_launched_at = self._at_work()
        for group, lane in waiting.items():
            assert lane.pace is not None
            kept = self._kept.get(group) or self._take_up(group, lane.pace, now)
            standing = replace(kept.standing, running=running.get(group, 0), any_launched_at=any_launched_at)
            taken_at = sample.snapshot.taken_at
            if taken_at is None or taken_at != standing.sampled_at:
                coming = self._coming(group, lane.pace, sample, now)
                standing = update_pace(standing, lane.pace, sample.snapshot, coming, now)
                self._note_unknown(
                    group, kept, unreadable_bounds(lane.pace, standing, has_devices=lane.need.devices > 0)
                )
            kept.standing = standing

    def rest(self) -> None:
        """Nothing is ready any more."""
        self._let_go(list(self._kept))

    def _let_go(self, groups: Iterable[int]) -> None:
        for group in groups:
            self._write(group, self._kept.pop(group))

    def record(self, plan: Plan, sample: Sample, now: float) -> None:
        """What became of it: who started, who waits for which gate, and for how long the last one held."""
        begun = (start for start in plan.starts if start.job_id in self._transitions.live)
        launched = {start.lane.group: start for start in begun if start.lane.pace is not None}
        holds = {hold.lane.group: hold for hold in plan.waiting if hold.lane.pace is not None}
        for group, kept in self._kept.items():
            if kept.gate is not None:
                self._count_wait(kept, now)
            start, hold = launched.get(group), holds.get(group)
            kept.held_by = hold.reasons[0] if hold is not None and hold.reasons else None
            kept.gate = None if hold is None else _GATES.get(kept.held_by.kind, "room") if kept.held_by else "room"
            kept.told_at = now
            if start is not None:
                kept.standing = replace(kept.standing, launched_at=now)
            self._log_rows(kept, start, sample)
            if start is not None or now >= kept.noted_at + _NOTE_EVERY_S:
                kept.noted_at = now
                self._write(group, kept)

    def wants_sample(self, now: float) -> bool:
        """Whether a run waits for nothing but for somebody to look again."""
        return any(
            kept.gate == "stagger" and (kept.standing.launched_at or 0.0) + kept.pace.stagger_s <= now
            for kept in self._kept.values()
        )

    def wake_at(self, now: float) -> float | None:
        """When the next one may start whom only the clock holds back."""
        times = [
            (kept.standing.launched_at or 0.0) + kept.pace.stagger_s
            for kept in self._kept.values()
            if kept.gate == "stagger"
        ]
        return min((at for at in times if at > now), default=None)

    def take_rows(self) -> list[tuple[str, GateSample]]:
        """What the sample logs are to be told, each with its file."""
        rows, self._rows = self._rows, []
        return rows

    def forget(self) -> None:
        """Something failed half-way: all is made anew from the store."""
        self._kept.clear()
        self._rows.clear()

    def _take_up(self, group: int, pace: BatchPace, now: float) -> _Kept:
        standing = PaceState(launched_at=self._transitions.store.last_start_in_batch(group))
        kept = self._kept[group] = _Kept(pace, standing, self._read(group))
        kept.told_at = kept.noted_at = now
        return kept

    def _read(self, group: int) -> BatchGateState:
        body = self._transitions.store.batch_state(group)
        return BatchGateState() if body is None else msgspec.json.decode(body, type=BatchGateState)

    def _write(self, group: int, kept: _Kept) -> None:
        self._transitions.store.set_batch_state(group, msgspec.json.encode(kept.batch).decode())

    def _count_wait(self, kept: _Kept, now: float) -> None:
        assert kept.gate is not None
        waits = dict(kept.batch.waits_s)
        waits[kept.gate] = waits.get(kept.gate, 0.0) + max(0.0, now - kept.told_at)
        kept.batch = replace(kept.batch, waits_s=waits)

    def _note_unknown(self, group: int, kept: _Kept, bounds: Iterable[str]) -> None:
        for bound in bounds:
            if bound not in kept.batch.unknown:
                kept.batch = replace(kept.batch, unknown=(*kept.batch.unknown, bound))
                _log.warning("batch %d: %s is not enforced, as no probe gives the figure", group, bound)

    def _at_work(self) -> tuple[dict[int, int], float | None]:
        """How many runs of each batch, and when the last of any started."""
        counts: dict[int, int] = {}
        starts = []
        for live in self._runs.values():
            if live.job.group is not None:
                counts[live.job.group] = counts.get(live.job.group, 0) + 1
            starts.append(live.attempt.started_at)
        return counts, max(starts, default=None)

    def _note_ends(self, now: float) -> None:
        runs = {live.attempt.key: live for live in self._transitions.live.values() if live.job.spec.pace is not None}
        self._ended += [(now, self._runs[key]) for key in self._runs.keys() - runs.keys()]
        self._ended = [(at, live) for at, live in self._ended if now - at < _FORGET_S]
        self._runs = runs

    def _coming(self, group: int, pace: BatchPace, sample: Sample, now: float) -> ExpectedUse:
        unshown, run_mb, run_vram_mb = 0.0, pace.run_ram_mb or 0.0, 0.0
        shown = self._shown_ram_mb()
        for live in self._runs.values():
            assert live.job.spec.pace is not None
            known = live.job.spec.pace.run_ram_mb or self._transitions.estimates.ram_mb(live.job)
            expected = known or shown.get(live.job.group, 0.0)
            unshown += max(0.0, expected - sample.ram_mb.get((live.attempt.job_id, live.attempt.number), 0.0))
            if live.job.group == group:
                run_mb = max(run_mb, expected)
                run_vram_mb = max(run_vram_mb, (live.attempt.usage and live.attempt.usage.peak_mb) or 0.0)
        cores = sample.snapshot.host.cpu_count
        core_percent = 100.0 / max(1.0, cores) if cores else 0.0
        devices = [device.id for device in sample.snapshot.usable_devices()]
        cpu_percent, loads = self._unshown_load(pace.smoothing_s, core_percent, devices, now)
        return ExpectedUse(
            unshown_mb=unshown, run_mb=run_mb, run_vram_mb=run_vram_mb, cpu_percent=cpu_percent, loads=loads
        )

    def _shown_ram_mb(self) -> dict[int | None, float]:
        """By batch, the most that one of its runs at work has had of RAM."""
        shown: dict[int | None, float] = {}
        for live in self._runs.values():
            ram_mb = live.attempt.usage.ram_mb if live.attempt.usage is not None else None
            shown[live.job.group] = max(shown.get(live.job.group, 0.0), ram_mb or 0.0)
        return shown

    def _unshown_load(
        self, smoothing_s: float, core_percent: float, devices: Sequence[str], now: float
    ) -> tuple[float, dict[str, float]]:
        """What averages do not show yet of those that have started, less what they still show of those that have ended:
        one run after another changes nothing. One of which nothing is known is taken to keep a core and its devices
        busy, or, where it has none of its own, those that its gates go by."""
        cpu_percent, loads = 0.0, dict[str, float]()
        changes = [(live.attempt.started_at, live, 1.0) for live in self._runs.values()]
        for at, live, sign in (*changes, *((at, live, -1.0) for at, live in self._ended)):
            cpu_percent += sign * unshown_percent(core_percent, now - at, smoothing_s)
            known = self._transitions.estimates.load_percent(live.job)
            load = sign * unshown_percent(100.0 if known is None else known, now - at, smoothing_s)
            for device_id in live.attempt.devices or _watched(live, devices):
                loads[device_id] = loads.get(device_id, 0.0) + load
        return max(0.0, cpu_percent), {device_id: max(0.0, load) for device_id, load in loads.items()}

    def _log_rows(self, kept: _Kept, start: Start | None, sample: Sample) -> None:
        path = kept.pace.sample_log
        if path is None:
            return
        devices = sample.snapshot.usable_devices()
        if start is None:
            if kept.logged_at == kept.standing.sampled_at:
                return
            kept.logged_at = kept.standing.sampled_at
            held_by = kept.held_by.text if kept.held_by is not None else None
            self._rows += [(path, replace(row, held_by=held_by)) for row in _rows(kept.standing, sample, devices)]
            return
        job = self._transitions.live[start.job_id].job
        chosen = {share.device_id for share in start.claim.shares}
        for row in _rows(kept.standing, sample, [device for device in devices if device.id in chosen]):
            self._rows.append(
                (path, replace(row, event="launch", job=job.id, index=job.values.get("index"),
                               gpu_memory_charged_mb=start.charged_mb))
            )  # fmt: skip


def _watched(live: Live, devices: Sequence[str]) -> Sequence[str]:
    pace, need = live.job.spec.pace, live.job.spec.need
    return [each for each in devices if watches(need, each)] if pace is not None and pace.gates_devices else ()


def _rows(standing: PaceState, sample: Sample, devices: Iterable[Device]) -> Iterator[GateSample]:
    host = GateSample(
        taken_at=iso_time(sample.snapshot.taken_at),
        event="sample",
        cpu_percent=standing.cpu.now,
        cpu_smoothed_percent=standing.cpu.smoothed.value,
        cpu_judged_percent=standing.cpu.judged,
        memory_available_mb=standing.memory.now,
        memory_judged_mb=standing.memory.judged,
        running=standing.running,
    )
    is_alone = True
    for device in devices:
        is_alone = False
        load = standing.device_loads.get(device.id, GateFigure())
        memory = standing.device_memory.get(device.id, GateFigure())
        yield replace(
            host,
            device=device.id,
            gpu_percent=load.now,
            gpu_smoothed_percent=load.smoothed.value,
            gpu_judged_percent=load.judged,
            gpu_memory_used_mb=memory.now,
            gpu_memory_judged_mb=memory.judged,
        )
    if is_alone:
        yield host
