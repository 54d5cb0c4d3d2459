"""A site on this machine: runs elements as processes, and fails on request."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from gpuyard.engines.cluster.site import (
    ClusterSubmission,
    ElementRef,
    Sighting,
    SiteRefused,
    SiteReport,
    SiteState,
    SiteUnreachable,
)
from gpuyard.model.cluster_terms import Amount, Offer
from gpuyard.model.job import SiteRequest


class ProcessSite:
    """Implements `Site`. Runs up to `most` elements at once.

    calls: the calls so far.
    down: every call raises SiteUnreachable.
    loses_answer: `submit` takes the elements and then raises SiteUnreachable.
    refuses: the message with which `submit` refuses.
    """

    name = "yonder"
    most_in_submission = 500

    def __init__(self, *, most: int = 8, free: Amount | None = None) -> None:
        self.calls: list[str] = []
        self.down = False
        self.loses_answer = False
        self.refuses: str | None = None
        self.free = free
        self._most = most
        self._waiting: list[tuple[ElementRef, ClusterSubmission]] = []
        self._running: dict[ElementRef, subprocess.Popen[bytes]] = {}
        self._over: dict[ElementRef, Sighting] = {}
        self._strays: list[subprocess.Popen[bytes]] = []

    def submit(self, submission: ClusterSubmission) -> str:
        self.calls.append(f"submit {submission.count}")
        self._answer()
        if self.refuses is not None:
            raise SiteRefused(self.refuses)
        self._waiting += [((submission.token, number), submission) for number in range(submission.count)]
        if self.loses_answer:
            raise SiteUnreachable("the answer was lost")
        return ""

    def request(self, submission: ClusterSubmission, number: int) -> SiteRequest:
        return SiteRequest(text=f"element {number} of {submission.token}")

    def report(self, live: Sequence[ClusterSubmission]) -> SiteReport:
        self.calls.append("report")
        self._answer()
        self._turn()
        wanted = {submission.token for submission in live}
        pending = {
            ref: Sighting(id=_id(ref), at=SiteState.PENDING, reason="waiting for its turn") for ref, _ in self._waiting
        }
        running = {ref: Sighting(id=_id(ref), at=SiteState.RUNNING, place="here") for ref in self._running}
        found = {**pending, **running, **self._over}
        return SiteReport(
            sightings={ref: each for ref, each in found.items() if ref[0] in wanted},
            offer=Offer(free=self.free, most_jobs=1000),
        )

    def cancel(self, ids: Sequence[str]) -> None:
        self.calls.append(f"cancel {len(ids)}")
        self._answer()
        for ref, _ in list(self._waiting):
            if _id(ref) in ids:
                self._over[ref] = Sighting(id=_id(ref), at=SiteState.CANCELLED)
        self._waiting = [each for each in self._waiting if _id(each[0]) not in ids]
        for ref, process in self._running.items():
            if _id(ref) in ids:
                process.send_signal(signal.SIGTERM)

    def output(self, sighting: Sighting) -> bytes | None:
        return None

    def forget_all(self) -> None:
        """Act like a cluster that was restarted: kill running elements with their children, and drop waiting ones."""
        running = list(self._running.values())
        self.lose_track()
        for process in running:
            _kill(process)

    def lose_track(self) -> None:
        """Forget all elements; the running ones continue."""
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
            raise SiteUnreachable("connection refused", hint="wait")

    def _turn(self) -> None:
        for ref, process in list(self._running.items()):
            status = process.poll()
            if status is not None:
                del self._running[ref]
                self._over[ref] = Sighting(
                    id=_id(ref),
                    at=SiteState.FAILED if status else SiteState.SUCCEEDED,
                    status=status,
                    ended_at=time.time(),
                )
        while self._waiting and len(self._running) < self._most:
            ref, submission = self._waiting.pop(0)
            output = Path(submission.folder, f"{ref[1]}.out")
            with output.open("wb") as file:
                self._running[ref] = subprocess.Popen(
                    [*submission.supervisor, str(ref[1])],
                    stdout=file,
                    stderr=file,
                    stdin=subprocess.DEVNULL,
                    env={"PATH": os.environ["PATH"]},
                    start_new_session=True,
                )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the supervisor first, before it could report the end of its program."""
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for each in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


def _id(ref: ElementRef) -> str:
    return f"{ref[0]}-{ref[1]}"
