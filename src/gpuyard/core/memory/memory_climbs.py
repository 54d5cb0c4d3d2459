"""The climbs of all live attempts on their devices. An attempt whose memory stays the same costs nothing at a reading:
the readings that it missed are added when its memory changes, as if it had been noted each time."""

from collections.abc import Collection, Mapping

from msgspec import Struct

from gpuyard.core.memory.memory_guard import RATE_OVER_S, MemoryClimb

# So many readings before the time over which a rate is taken decide which points of a climb are kept.
_OLDER_READINGS = 3

AttemptKey = tuple[int, int]  # job id and attempt number
HeldMemory = Mapping[str, float | None]  # what an attempt holds on each device, in MB


class _Level(Struct, frozen=True):
    """An attempt that has held the same on all its devices since a full reading."""

    held: HeldMemory
    since: float


class MemoryClimbs:
    """`growing` are the devices on which an attempt grows, for attempts that do."""

    def __init__(self) -> None:
        self.growing: dict[AttemptKey, set[str]] = {}
        self._climbs: dict[AttemptKey, dict[str, MemoryClimb]] = {}
        self._levels: dict[AttemptKey, _Level] = {}
        self._read_at: list[float] = []  # the last readings of all devices

    def on(self, key: AttemptKey, device_id: str) -> MemoryClimb | None:
        """Return the climb of an attempt on a device. Its readings may be too few while its memory stays the same."""
        return self._climbs.get(key, {}).get(device_id)

    def start_reading(self, now: float, reread: Collection[str]) -> None:
        """Begin to note a reading of all devices, or of those in `reread`."""
        if reread:
            return
        older = sum(at <= now - RATE_OVER_S for at in self._read_at)
        del self._read_at[: max(0, older - _OLDER_READINGS)]
        self._read_at.append(now)

    def is_level(self, key: AttemptKey, held: HeldMemory) -> bool:
        """Return whether an attempt holds what it held before: then a reading of all devices changes nothing."""
        level = self._levels.get(key)
        return level is not None and level.held == held

    def note(
        self, key: AttemptKey, held: HeldMemory, now: float, reread: Collection[str], began_at: float | None
    ) -> None:
        """Note what an attempt holds on each device; a device of unknown memory starts anew. `began_at`: when its
        program began that held nothing before."""
        level = self._levels.get(key)
        if level is not None and not reread and level.held == held:
            return
        climbs = self._climbs.setdefault(key, {})
        if level is not None:
            self._catch_up(climbs, level, now, is_full=not reread)
            del self._levels[key]
        for device_id, held_mb in held.items():
            if held_mb is None:
                climbs.pop(device_id, None)
            elif not reread or device_id in reread:
                climbs[device_id] = climbs.get(device_id, MemoryClimb()).add(now, held_mb, began_at)
        growing = {device_id for device_id, climb in climbs.items() if climb.rate_mb_s}
        if growing:
            self.growing[key] = growing
            return
        self.growing.pop(key, None)
        if not reread and len(climbs) == len(held) and all(map(_is_level, climbs.values())):
            self._levels[key] = _Level(held, now)

    def drop(self, key: AttemptKey) -> None:
        """Forget an attempt whose memory is not on its devices."""
        for known in (self._climbs, self.growing, self._levels):
            known.pop(key, None)

    def keep(self, job_ids: Collection[int]) -> None:
        """Forget the attempts of all other jobs."""
        for key in [key for key in self._climbs if key[0] not in job_ids]:
            self.drop(key)

    def _catch_up(self, climbs: dict[str, MemoryClimb], level: _Level, now: float, *, is_full: bool) -> None:
        missed = [at for at in self._read_at if level.since < at < now or (at == now and not is_full)]
        for device_id, climb in climbs.items():
            for at in missed:
                climb = climb.add(at, climb.held_mb)  # noqa: PLW2901
            climbs[device_id] = climb


def _is_level(climb: MemoryClimb) -> bool:
    return all(point[1] == climb.held_mb for point in climb.points)
