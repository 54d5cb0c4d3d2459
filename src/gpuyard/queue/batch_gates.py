"""Gates of batches: their state from sample to sample, how long each gate held a batch, and rows of its sample log."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpuyard.model.job_spec import BatchPace
from gpuyard.model.machine_snapshot import Device, Sample, Snapshot, iso_time
from gpuyard.policy import batch_pacing as pacing
from gpuyard.policy.batch_pacing import unreadable_bounds, watches, why_unread
from gpuyard.policy.device_names import silent_probe
from gpuyard.policy.queue_order import Lane
from gpuyard.policy.wait_reasons import Reason, ReasonKind
from gpuyard.policy.world import Plan, Start
from gpuyard.queue.live_attempts import Live
from gpuyard.queue.transitions import JobTransitions

_log = logging.getLogger(__name__)
_GATES = {
    ReasonKind.STAGGERED: "stagger",
    ReasonKind.LIMIT: "concurrency",
    ReasonKind.HOST_TOO_BUSY: "cpu",
    ReasonKind.HOST_TOO_FULL: "memory",
    ReasonKind.TOO_BUSY: "gpu",
    ReasonKind.OCCUPIED: "gpu",
    ReasonKind.TOO_FULL: "gpu-memory",
    ReasonKind.PAUSED: "pause",
}


class BatchGateState(Struct, frozen=True, kw_only=True):
    """What the store keeps of a batch: for how long each gate held its next run, limits that cannot be enforced because
    no probe measures the value, and which probe of GPUs did not answer."""

    waits_s: dict[str, float] = {}
    unknown: tuple[str, ...] = ()
    silent: str | None = None


# The columns of a sample log: the host, and one device if any, as the gates saw them.
COLUMNS = (
    "taken_at", "event", "job", "index", "device", "cpu_percent", "cpu_smoothed_percent", "cpu_judged_percent",
    "memory_available_mb", "memory_judged_mb", "gpu_percent", "gpu_smoothed_percent", "gpu_judged_percent",
    "gpu_memory_used_mb", "gpu_memory_judged_mb", "gpu_memory_charged_mb", "running", "held_by",
)  # fmt: skip


class _WaitingBatch(Struct, kw_only=True):
    """A batch that has runs to start."""

    pace: BatchPace
    pace_state: pacing.PaceState
    saved: BatchGateState
    counted_at: float
    saved_at: float
    held_by: Reason | None = None
    gate: str | None = None
    logged_at: float | None = None


class BatchGates:
    """Keeps a batch in memory while it has runs to start; what has to survive a restart is in the store."""

    def __init__(self, transitions: JobTransitions, to_wall: Callable[[float], float] = float) -> None:
        """`to_wall` makes a time of the queue one for people, for the sample log."""
        self._transitions, self._to_wall = transitions, to_wall
        self._waiting: dict[int, _WaitingBatch] = {}
        self._rows: list[tuple[str, dict[str, Any]]] = []
        self._runs: dict[str, Live] = {}
        self._ended: list[tuple[float, Live]] = []

    @property
    def pace_states(self) -> dict[int, pacing.PaceState]:
        return {group: batch.pace_state for group, batch in self._waiting.items()}

    @property
    def is_waiting(self) -> bool:
        """Whether a batch has runs to start: its averages need a sample from time to time."""
        return bool(self._waiting)

    def held_by(self, group: int) -> tuple[str, Reason] | None:
        """Return the gate that holds the batch, and the reason; None if no gate does."""
        batch = self._waiting.get(group)
        return None if batch is None or batch.held_by is None or batch.gate is None else (batch.gate, batch.held_by)

    def saved_state(self, group: int) -> BatchGateState:
        return self._waiting[group].saved if group in self._waiting else self._read(group)

    def update(self, lanes: Iterable[Lane], sample: Sample, now: float) -> None:
        """Update the pace of all batches that have runs to start."""
        waiting = {lane.group: lane for lane in lanes if lane.pace is not None and lane.group is not None}
        if not waiting and not self._waiting:
            return
        self.close(besides=waiting)
        runs = {live.attempt.key: live for live in self._transitions.live.values() if live.job.spec.pace is not None}
        self._ended += [(now, self._runs[key]) for key in self._runs.keys() - runs.keys()]
        self._ended = [(at, live) for at, live in self._ended if now - at < 60.0]
        self._runs = runs
        running = Counter(live.job.group for live in self._runs.values())
        any_launched_at = max((live.attempt.since for live in self._runs.values()), default=None)
        for group, lane in waiting.items():
            assert lane.pace is not None
            batch = self._waiting.get(group)
            if batch is None:
                first = pacing.PaceState(launched_at=self._transitions.store.last_start_in_batch(group))
                saved = self._read(group)
                batch = _WaitingBatch(pace=lane.pace, pace_state=first, saved=saved, counted_at=now, saved_at=now)
                self._waiting[group] = batch
            state = replace(batch.pace_state, running=running[group], any_launched_at=any_launched_at)
            taken_at = sample.snapshot.taken_at
            if taken_at is None or taken_at != state.sampled_at:
                expected = self._expected_use(group, lane.pace, sample, now)
                state = pacing.update_pace(state, lane.pace, sample.snapshot, expected, now)
                if batch.saved.silent is None and (silent := silent_probe(lane.need.vendor, sample.snapshot)):
                    batch.saved = replace(batch.saved, silent=silent.sentence)
                self._note_unknown(group, batch, unreadable_bounds(lane.pace, state, has_devices=lane.need.devices > 0))
            batch.pace_state = state

    def close(self, besides: Iterable[int] = ()) -> None:
        """Save and drop all batches but these, as no job of them is ready any more."""
        for group in self._waiting.keys() - set(besides):
            self._save(group, self._waiting.pop(group))

    def record(self, plan: Plan, sample: Sample, now: float) -> None:
        """Record the result of a plan: which runs started, which gate holds each batch, and for how long."""
        started = (start for start in plan.starts if start.job_id in self._transitions.live)
        launched = {start.lane.group: start for start in started if start.lane.pace is not None}
        waiting = {each.lane.group: each for each in plan.waiting if each.lane.pace is not None}
        for group, batch in self._waiting.items():
            if batch.gate is not None:
                waited_s = batch.saved.waits_s.get(batch.gate, 0.0) + max(0.0, now - batch.counted_at)
                batch.saved = replace(batch.saved, waits_s={**batch.saved.waits_s, batch.gate: waited_s})
            start, held = launched.get(group), waiting.get(group)
            batch.held_by = reason = None if held is None else next(iter(held.reasons), None)
            batch.gate = None if held is None else "room"
            if reason is not None and not (reason.kind is ReasonKind.LIMIT and reason.device_id):
                batch.gate = _GATES.get(reason.kind, "room")
            batch.counted_at = now
            if start is not None:
                batch.pace_state = replace(batch.pace_state, launched_at=now)
            self._log_rows(batch, start, sample)
            if start is not None or now >= batch.saved_at + 5.0:
                batch.saved_at = now
                self._save(group, batch)

    def wants_sample(self, now: float) -> bool:
        """Return whether a run waits only for the next sample."""
        return any(at <= now for at in self._stagger_ends())

    def wake_at(self, now: float) -> float | None:
        """Return when the next run may start that waits only for its stagger time."""
        return min((at for at in self._stagger_ends() if at > now), default=None)

    def _stagger_ends(self) -> Iterator[float]:
        for batch in self._waiting.values():
            if batch.gate == "stagger":
                yield (batch.pace_state.launched_at or 0.0) + batch.pace.stagger_s

    def take_rows(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the new rows of sample logs, each with its file."""
        rows, self._rows = self._rows, []
        return rows

    def forget(self) -> None:
        """Drop everything after a failed step; it is read from the store again."""
        self._waiting.clear()
        self._rows.clear()

    def _read(self, group: int) -> BatchGateState:
        body = self._transitions.store.batch_state(group)
        return BatchGateState() if body is None else msgspec.json.decode(body, type=BatchGateState)

    def _save(self, group: int, batch: _WaitingBatch) -> None:
        self._transitions.store.set_batch_state(group, msgspec.json.encode(batch.saved).decode())

    def _note_unknown(self, group: int, batch: _WaitingBatch, limits: Iterable[str]) -> None:
        for limit in limits:
            if limit not in batch.saved.unknown:
                batch.saved = replace(batch.saved, unknown=(*batch.saved.unknown, limit))
                _log.warning("batch %d: %s is not enforced: %s", group, limit, why_unread(limit, batch.saved.silent))

    def _expected_use(self, group: int, pace: BatchPace, sample: Sample, now: float) -> pacing.ExpectedUse:
        unshown, run_mb, run_vram_mb = 0.0, pace.run_ram_mb or 0.0, 0.0
        shown: dict[int | None, float] = {}  # the peak RAM of a single running run, by batch
        for live in self._runs.values():
            ram_mb = live.attempt.usage.ram_mb if live.attempt.usage is not None else None
            shown[live.job.group] = max(shown.get(live.job.group, 0.0), ram_mb or 0.0)
        for live in self._runs.values():
            assert live.job.spec.pace is not None
            known = live.job.spec.pace.run_ram_mb or self._transitions.estimates.figure(live.job, "ram_mb")
            expected = known or shown.get(live.job.group, 0.0)
            unshown += max(0.0, expected - sample.ram_mb.get((live.attempt.job_id, live.attempt.number), 0.0))
            if live.job.group == group:
                run_mb = max(run_mb, expected)
                run_vram_mb = max(run_vram_mb, (live.attempt.usage and live.attempt.usage.peak_mb) or 0.0)
        cpu_percent, loads = self._unshown_load(pace.smoothing_s, sample.snapshot, now)
        own = {"unshown_mb": unshown, "run_mb": run_mb, "run_vram_mb": run_vram_mb}
        return pacing.ExpectedUse(**own, cpu_percent=cpu_percent, loads=loads)

    def _unshown_load(self, smoothing_s: float, snapshot: Snapshot, now: float) -> tuple[float, dict[str, float]]:
        """Return the CPU and device load of started runs that the averages do not show yet, minus that of ended runs
        that they still show: a run that replaces another changes nothing. A run without an estimate is assumed to keep
        one core and its devices busy; without devices of its own, those that its gates watch."""
        cpu_percent, loads, cores = 0.0, dict[str, float](), snapshot.host.cpu_count
        core_percent = 100.0 / max(1.0, cores) if cores else 0.0
        devices = [device.id for device in snapshot.usable_devices()]
        changes = [(live.attempt.since, live, 1.0) for live in self._runs.values()]
        for at, live, sign in (*changes, *((at, live, -1.0) for at, live in self._ended)):
            cpu_percent += sign * pacing.unshown_percent(core_percent, now - at, smoothing_s)
            known = self._transitions.estimates.figure(live.job, "load_percent")
            load = sign * pacing.unshown_percent(100.0 if known is None else known, now - at, smoothing_s)
            pace, need = live.job.spec.pace, live.job.spec.need
            watched = devices if pace is not None and pace.gates_devices else []
            for device_id in live.attempt.devices or [each for each in watched if watches(need, each)]:
                loads[device_id] = loads.get(device_id, 0.0) + load
        return max(0.0, cpu_percent), {device_id: max(0.0, load) for device_id, load in loads.items()}

    def _log_rows(self, batch: _WaitingBatch, start: Start | None, sample: Sample) -> None:
        path = batch.pace.sample_log
        if path is None:
            return
        devices: Sequence[Device] = sample.snapshot.usable_devices()
        if start is None:
            if batch.logged_at == batch.pace_state.sampled_at:
                return
            batch.logged_at = batch.pace_state.sampled_at
            fields: dict[str, Any] = {
                "event": "sample",
                "held_by": batch.held_by.text if batch.held_by is not None else None,
            }
        else:
            job = self._transitions.live[start.job_id].job
            chosen = {share.device_id for share in start.claim.shares}
            devices = [device for device in devices if device.id in chosen]
            fields = {"event": "launch", "job": job.id, "index": job.values.get("index")}
            fields["gpu_memory_charged_mb"] = start.charged_mb
        taken_at, state = sample.snapshot.taken_at, batch.pace_state
        host = {
            **dict.fromkeys(COLUMNS),
            **fields,
            "taken_at": None if taken_at is None else iso_time(self._to_wall(taken_at)),
            "cpu_percent": state.cpu.now,
            "cpu_smoothed_percent": state.cpu.smoothed.value,
            "cpu_judged_percent": state.cpu.judged,
            "memory_available_mb": state.memory.now,
            "memory_judged_mb": state.memory.judged,
            "running": state.running,
        }
        for device in devices:
            load = state.device_loads.get(device.id, pacing.GateFigure())
            memory = state.device_memory.get(device.id, pacing.GateFigure())
            of_device = {
                "device": device.id,
                "gpu_percent": load.now,
                "gpu_smoothed_percent": load.smoothed.value,
                "gpu_judged_percent": load.judged,
                "gpu_memory_used_mb": memory.now,
                "gpu_memory_judged_mb": memory.judged,
            }
            self._rows.append((path, host | of_device))
        if not devices:
            self._rows.append((path, host))
