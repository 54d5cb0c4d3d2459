"""The recent device time of users and tags, by which jobs of equal priority are ordered."""

from collections.abc import Iterable

from gpuyard.control.live_jobs import Live
from gpuyard.core.scheduling.queue_order import Party, WeightedUse, add_use, weight
from gpuyard.store.job_store import JobStore


class RecentUse:
    """Kept in memory, and written to the store by `save`."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._uses: dict[Party, WeightedUse] = {}
        self._unsaved: set[Party] = set()

    def reload(self) -> None:
        self._uses = self._store.learned.recent_use()
        self._unsaved.clear()

    def add(self, ended: Live, now: float) -> None:
        party = _party(ended)
        self._uses[party] = add_use(self._uses.get(party, WeightedUse()), ended.device_seconds(now), now)
        self._unsaved.add(party)

    def used(self, running: Iterable[Live], now: float) -> dict[Party, float]:
        """Return the recent use of each user and tag, including running jobs."""
        used = {party: weight(use, now) for party, use in self._uses.items()}
        for live in running:
            party = _party(live)
            used[party] = used.get(party, 0.0) + live.device_seconds(now)
        return used

    def save(self) -> None:
        for party in self._unsaved & self._uses.keys():
            self._store.learned.set_recent_use(party, self._uses[party])
        self._unsaved.clear()


def _party(live: Live) -> Party:
    return live.job.user, live.job.spec.tag
