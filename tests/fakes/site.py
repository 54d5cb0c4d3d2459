"""A site on this very machine: it runs elements as processes, one at a time or many, and fails as it is told to."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from gpuyard.core.cluster.offer import Amount, Offer
from gpuyard.engines.cluster.site import (
    ClusterSubmission,
    Mark,
    Sighting,
    SiteRefused,
    SiteReport,
    SiteState,
    SiteUnreachable,
)


class ProcessSite:
    """Implements `Site`. Its `calls` are what it was asked. While it is `down`, nobody reaches it; with `loses_answer`,
    what it does it does, and nobody hears of it; it `refuses` with these words. `most` run at once."""

    name = "yonder"
    most_in_parcel = 500

    def __init__(self, *, most: int = 8, free: Amount | None = None) -> None:
        self.calls: list[str] = []
        self.down = False
        self.loses_answer = False
        self.refuses: str | None = None
        self.free = free
        self._most = most
        self._waiting: list[tuple[Mark, ClusterSubmission]] = []
        self._running: dict[Mark, subprocess.Popen[bytes]] = {}
        self._over: dict[Mark, Sighting] = {}
        self._strays: list[subprocess.Popen[bytes]] = []

    def submit(self, parcel: ClusterSubmission) -> str:
        self.calls.append(f"submit {parcel.count}")
        self._answer()
        if self.refuses is not None:
            raise SiteRefused(self.refuses)
        self._waiting += [((parcel.token, number), parcel) for number in range(parcel.count)]
        if self.loses_answer:
            raise SiteUnreachable("the answer was lost")
        return ""

    def look(self, live: Sequence[ClusterSubmission]) -> SiteReport:
        self.calls.append("look")
        self._answer()
        self._turn()
        wanted = {parcel.token for parcel in live}
        pending = {
            mark: Sighting(id=_id(mark), at=SiteState.PENDING, reason="its turn comes") for mark, _ in self._waiting
        }
        running = {mark: Sighting(id=_id(mark), at=SiteState.RUNNING, place="here") for mark in self._running}
        found = {**pending, **running, **self._over}
        return SiteReport(
            sightings={mark: each for mark, each in found.items() if mark[0] in wanted},
            offer=Offer(free=self.free, most_jobs=1000),
        )

    def cancel(self, ids: Sequence[str]) -> None:
        self.calls.append(f"cancel {len(ids)}")
        self._answer()
        for mark, _ in list(self._waiting):
            if _id(mark) in ids:
                self._over[mark] = Sighting(id=_id(mark), at=SiteState.CANCELLED)
        self._waiting = [each for each in self._waiting if _id(each[0]) not in ids]
        for mark, process in self._running.items():
            if _id(mark) in ids:
                process.send_signal(signal.SIGTERM)

    def output(self, sighting: Sighting) -> bytes | None:
        return None

    def forget_all(self) -> None:
        """As a cluster that is started anew: what ran is killed, with all that it had started; what waited is gone."""
        running = list(self._running.values())
        self.lose_track()
        for process in running:
            _kill(process)

    def lose_track(self) -> None:
        """What runs goes on, and nobody at the site knows of it any more."""
        self._strays += self._running.values()
        self._running.clear()
        self._waiting.clear()
        self._over.clear()

    def close(self) -> None:
        self.lose_track()
        for process in self._strays:
            _kill(process)

    def _answer(self) -> None:
        if self.down:
            raise SiteUnreachable("nobody is there", hint="wait")

    def _turn(self) -> None:
        for mark, process in list(self._running.items()):
            status = process.poll()
            if status is not None:
                del self._running[mark]
                self._over[mark] = Sighting(
                    id=_id(mark),
                    at=SiteState.FAILED if status else SiteState.SUCCEEDED,
                    status=status,
                    ended_at=time.time(),
                )
        while self._waiting and len(self._running) < self._most:
            mark, parcel = self._waiting.pop(0)
            output = Path(parcel.folder, f"{mark[1]}.out")
            with output.open("wb") as file:
                self._running[mark] = subprocess.Popen(
                    [*parcel.supervisor, str(mark[1])],
                    stdout=file,
                    stderr=file,
                    stdin=subprocess.DEVNULL,
                    env={"PATH": os.environ["PATH"]},
                    start_new_session=True,
                )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """First of all who would tell of it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for each in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


def _id(mark: Mark) -> str:
    return f"{mark[0]}-{mark[1]}"
