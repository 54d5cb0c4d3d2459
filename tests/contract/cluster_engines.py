"""A place for the engine contract: a cluster engine that submits to a site.

Each daemon (this process, and those that are killed) makes the site from a function's name and its argument:
`ClusterPlace(folder, "package.module:function", "argument")`. The site's nodes have to be on this machine.
"""

import contextlib
import importlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import psutil

from gpuyard.engines.cluster import engine as module
from gpuyard.engines.cluster.engine import ClusterEngine
from gpuyard.engines.cluster.site import Site
from gpuyard.model.cluster_terms import ClusterTerms
from gpuyard.model.lease import Need
from gpuyard.ports import Ended, Engine, Launch, Prepared
from tests.contract.engine import DEADLINE_S, Programs, until
from tests.fakes.distant_site import SiteServer
from tests.fakes.site import ProcessSite

TERMS = ClusterTerms(need=Need(devices=0), name="contract")
ROOT = Path(__file__).parents[2]
# A daemon that is killed: the site has reported everything that it submitted, or it has submitted nothing.
DAEMON = """
import os, select, signal, sys
import msgspec
from tests.contract.cluster_engines import hasten, open_cluster_engine
from gpuyard.ports import Launch
folder, maker, argument, begins, launches = sys.argv[1:]
hasten()
engine = open_cluster_engine(folder, maker, argument)
prepared = [engine.prepare(launch, None) for launch in msgspec.json.decode(launches, type=list[Launch])]
missing = {(each.job_id, each.attempt) for each in prepared}
if begins:
    engine.start_prepared()
    while missing:
        select.select([], [], [], 0.01)
        missing -= {(each.job_id, each.attempt) for each in engine.site_changes()}
os.write(1, msgspec.json.encode(prepared))
os.kill(os.getpid(), signal.SIGKILL)
"""


def hasten() -> Callable[[], None]:
    """Shorten the waits of cluster engines to hundredths of seconds. Return a function that undoes it."""
    quick = {"_TICK_S": 0.05, "_SOON_S": 0.02, "_FIRST_PAUSE_S": 0.04, "_LONGEST_PAUSE_S": 0.2}
    before = {name: getattr(module, name) for name in quick}

    def put(values: dict[str, float]) -> None:
        for name, value in values.items():
            setattr(module, name, value)

    put(quick)
    return lambda: put(before)


def open_cluster_engine(
    folder: str, maker: str, argument: str, on_news: Callable[[], None] = lambda: None
) -> ClusterEngine:
    path, _, name = maker.partition(":")
    site: Site = getattr(importlib.import_module(path), name)(argument)
    return ClusterEngine(site, Path(folder), on_news, poll_s=0.1)


class ClusterPlace(Programs):
    """Implements `Place`."""

    places_work = True

    def __init__(self, folder: Path, maker: str, argument: str) -> None:
        super().__init__(folder)
        self.queue = folder / "queue"
        self._maker = maker
        self._argument = argument
        self._news = threading.Event()
        self._engines: list[ClusterEngine] = []
        self._orphans: list[psutil.Process] = []

    def engine(self) -> ClusterEngine:
        self._engines.append(open_cluster_engine(str(self.queue), self._maker, self._argument, self._news.set))
        return self._engines[-1]

    def launch(self, job_id: int, kind: str) -> Launch:
        return msgspec.structs.replace(super().launch(job_id, kind), engine="yonder", terms=TERMS)

    def ended(self, engine: Engine, count: int) -> list[Ended]:
        ends = engine.ended()

        def has_all() -> bool:
            ends.extend(engine.ended() if len(ends) < count else ())
            return len(ends) >= count

        until(has_all, f"{count} ends", every_s=0.02)
        return ends

    def die(self, launches: Sequence[Launch], *, begun: bool) -> list[Prepared]:
        encoded = msgspec.json.encode(launches).decode()
        call = [
            sys.executable, "-c", DAEMON, str(self.queue), self._maker, self._argument, "begin" if begun else "",
            encoded,
        ]  # fmt: skip
        ran = subprocess.run(call, cwd=ROOT, stdout=subprocess.PIPE, timeout=DEADLINE_S, check=False)
        assert ran.returncode == -signal.SIGKILL
        return msgspec.json.decode(ran.stdout, type=list[Prepared])

    def kill_supervisor(self, prepared: Prepared) -> None:
        key = f"{prepared.job_id}.{prepared.attempt}"
        for submission in self.queue.glob("*/submissions/*/submission.json"):
            for number, element in enumerate(json.loads(submission.read_text())["elements"]):
                if element["key"] == key:
                    supervisor = psutil.Process(
                        json.loads((submission.parent / f"{number}.started").read_text())["pid"]
                    )
                    self._orphans += supervisor.children(recursive=True)
                    supervisor.kill()

    def boot_id(self) -> str | None:
        return None

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
        for orphan in self._orphans:
            with contextlib.suppress(psutil.NoSuchProcess):
                orphan.kill()


@contextlib.contextmanager
def process_place(folder: Path) -> Iterator[ClusterPlace]:
    """A place with a site of real processes, which outlives daemons and ends its processes when it is closed."""
    site = ProcessSite()
    server = SiteServer(site, str(folder / "site"))
    slow_again = hasten()
    place = ClusterPlace(folder, "tests.fakes.distant_site:DistantSite", str(folder / "site"))
    yield place
    place.close()
    slow_again()
    server.close()
    with server.lock:
        site.close()
