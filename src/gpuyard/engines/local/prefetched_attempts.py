"""The attempts in the prefetch queue of a keeper, as the daemon knows them, and those that the keeper has started.

Their logs are created here: that takes some file systems longer than the keeper needs for all the rest of a start. They
are marked as unused until then (`unused_log`).
"""

import contextlib
import marshal
import os

from gpuyard.engines.common.unused_log import create_log
from gpuyard.engines.local.keeper_connection import JournalEntry, KeeperConnection
from gpuyard.engines.local.watched_attempt import WatchedAttempt
from gpuyard.ports import Followed
from gpuyard.system.clock import wall_time_of


class PrefetchedAttempts:
    def __init__(self) -> None:
        self._attempts: dict[str, WatchedAttempt] = {}  # by key
        self._followed: list[Followed] = []

    def __bool__(self) -> bool:
        return bool(self._attempts)

    def job_ids(self) -> set[int]:
        """Return also the jobs of those that have begun, until `take_followed` returns them."""
        return {each.job_id for each in self._attempts.values()} | {each.job_id for each in self._followed}

    def put(self, keeper: KeeperConnection, group: int, content: bytes, watched: WatchedAttempt) -> bool:
        """Return False if there is no room for it."""
        if keeper.prefetch_queue is None or watched.log is None or not create_log(watched.log):
            return False
        if not keeper.prefetch_queue.put(group, content):
            os.unlink(watched.log)
            return False
        self._attempts[watched.key] = watched
        return True

    def take_back(self, keeper: KeeperConnection, most: int | None = None) -> None:
        """Take back the first ones, or all that the keeper has not taken: what is left then has begun, and the keeper
        says so in a moment."""
        for content in keeper.prefetch_queue.take_back(most) if keeper.prefetch_queue is not None else ():
            taken = self._attempts.pop(marshal.loads(content)[0], None)  # noqa: S302 - our own
            if taken is not None and taken.log is not None:
                with contextlib.suppress(OSError):
                    os.unlink(taken.log)

    def begin(self, entry: JournalEntry) -> WatchedAttempt | None:
        """Note the line by which a keeper says that it took an attempt. Return the attempt if it was in its queue."""
        watched = self._attempts.get(entry.key)
        if watched is None or watched.keeper_pid != entry.keeper:
            return None
        self._followed.append(followed_of(entry, watched.log))
        return self._attempts.pop(entry.key)

    def lose(self, keeper_pid: int) -> None:
        """Forget what was in the prefetch queue of a keeper that is gone."""
        self._attempts = {key: each for key, each in self._attempts.items() if each.keeper_pid != keeper_pid}

    @property
    def has_followed(self) -> bool:
        return bool(self._followed)

    def take_followed(self) -> list[Followed]:
        taken, self._followed = self._followed, []
        return taken


def followed_of(entry: JournalEntry, log: str | None) -> Followed:
    """Return what a line such as `18.1 4242 follows 17.1 86400.123 .` says."""
    assert entry.after is not None
    assert entry.at is not None
    (job_id, number), (after, after_number) = (map(int, key.split(".")) for key in (entry.key, entry.after))
    return Followed(
        job_id=job_id,
        attempt=number,
        after=(after, after_number),
        at=wall_time_of(entry.at),
        keeper_pid=entry.keeper,
        log=log or "",
    )
