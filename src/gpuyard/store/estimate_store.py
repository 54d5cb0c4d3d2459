"""EstimateStore: the recent device time of users and tags, and what was learned under each fingerprint."""

from gpuyard.core.memory.estimates import Profile
from gpuyard.core.scheduling.queue_order import Party, WeightedUse
from gpuyard.store import row_codec
from gpuyard.store.database import Database


class EstimateStore:
    def __init__(self, database: Database) -> None:
        self._execute = database.execute

    def recent_use(self) -> dict[Party, WeightedUse]:
        rows = self._execute("SELECT user, tag, seconds, at FROM uses").fetchall()
        return {(user, tag): WeightedUse(seconds=seconds, at=at) for user, tag, seconds, at in rows}

    def set_recent_use(self, party: Party, use: WeightedUse) -> None:
        self._execute("INSERT OR REPLACE INTO uses VALUES (?, ?, ?, ?)", (*party, use.seconds, use.at))

    def profile(self, fingerprint: str) -> Profile | None:
        row = self._execute("SELECT body FROM profiles WHERE fingerprint = ?", (fingerprint,)).fetchone()
        return None if row is None else row_codec.profile_from_text(row[0])

    def set_profile(self, fingerprint: str, profile: Profile) -> None:
        row = (fingerprint, row_codec.profile_to_text(profile), profile.seen_at)
        self._execute("INSERT OR REPLACE INTO profiles VALUES (?, ?, ?)", row)
