"""LearnedStore: what the queue has learned from finished jobs, in SQL: who used devices, and what jobs take."""

import msgspec

from gpuyard.core.memory.estimates import Profile
from gpuyard.core.scheduling.queue_order import Party, WeightedUse
from gpuyard.store import row_codec
from gpuyard.store.database import Database


class LearnedStore:
    def __init__(self, database: Database) -> None:
        self._execute = database.execute
        self._value = database.value

    def recent_use(self) -> dict[Party, WeightedUse]:
        """Return the recent device time of users and tags."""
        rows = self._execute("SELECT user, tag, seconds, at FROM uses").fetchall()
        return {(user, tag): WeightedUse(seconds=seconds, at=at) for user, tag, seconds, at in rows}

    def set_recent_use(self, party: Party, use: WeightedUse) -> None:
        self._execute("INSERT OR REPLACE INTO uses VALUES (?, ?, ?, ?)", (*party, use.seconds, use.at))

    def profile(self, fingerprint: str) -> Profile | None:
        body = self._value("SELECT body FROM profiles WHERE fingerprint = ?", (fingerprint,))
        return None if body is None else msgspec.json.decode(body, type=Profile)

    def set_profile(self, fingerprint: str, profile: Profile) -> None:
        row = (fingerprint, row_codec.to_json(profile), profile.seen_at)
        self._execute("INSERT OR REPLACE INTO profiles VALUES (?, ?, ?)", row)
