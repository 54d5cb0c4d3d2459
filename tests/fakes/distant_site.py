"""A site that outlives its daemons, like real ones: one process has it, and others call it through a socket."""

import os
import signal
import threading
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from gpuyard.engines.cluster.site import ClusterSubmission, Sighting, Site, SiteReport, SiteUnreachable
from gpuyard.errors import EnvironmentFault
from gpuyard.model.job import SiteRequest


class SiteServer:
    """Serves calls to a site, one at a time, under `lock`. Take the lock to change the site."""

    def __init__(self, site: Site, path: str) -> None:
        self.lock = threading.RLock()
        self._site = site
        self._listener = Listener(path, "AF_UNIX")
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                asking = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(asking,), daemon=True).start()

    def _answer(self, asking: "Connection[Any, Any]") -> None:
        with asking:
            while True:
                try:
                    name, arguments = asking.recv()
                    with self.lock:
                        answer = self._call(name, arguments)
                    asking.send(answer)
                except (EOFError, OSError):
                    return

    def _call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        try:
            return getattr(self._site, name)(*arguments)
        except EnvironmentFault as error:
            return error


def mortal(argument: str) -> "DistantSite":
    """Return a site with a process that dies at a given call. `argument` is `PATH:WHEN`."""
    path, _, dies = argument.rpartition(":")
    return DistantSite(path, dies)


class DistantSite:
    """Implements `Site`. Its process `dies` (by SIGKILL) before or after a call: `before submit`, `after submit`."""

    name = "yonder"
    most_in_submission = 500

    def __init__(self, path: str, dies: str = "") -> None:
        self._path = path
        self._dies = dies
        self._asking: Connection[Any, Any] | None = None

    def submit(self, submission: ClusterSubmission) -> str:
        self._ask("submit", submission)
        return ""

    def request(self, submission: ClusterSubmission, number: int) -> SiteRequest:
        return SiteRequest(text=f"element {number} of {submission.token}")

    def report(self, live: Sequence[ClusterSubmission]) -> SiteReport:
        report = self._ask("report", list(live))
        assert isinstance(report, SiteReport)
        return report

    def cancel(self, ids: Sequence[str]) -> None:
        self._ask("cancel", list(ids))

    def output(self, sighting: Sighting) -> bytes | None:
        return None

    def _ask(self, name: str, argument: object) -> object:
        self._may_die(f"before {name}")
        try:
            if self._asking is None:
                self._asking = Client(self._path, "AF_UNIX")
            self._asking.send((name, (argument,)))
            answer: object = self._asking.recv()
        except (EOFError, OSError) as error:
            self._asking = None
            raise SiteUnreachable(f"no answer at {self._path}") from error
        if isinstance(answer, EnvironmentFault):
            raise answer
        self._may_die(f"after {name}")
        return answer

    def _may_die(self, when: str) -> None:
        if when == self._dies:
            os.kill(os.getpid(), signal.SIGKILL)
