"""A place for the engine contract where an outpost hands work over to a site.

The site is made anew by each daemon, this process's and those that are killed, from a function's name and a word:
`OutpostPlace(folder, "package.module:function", "word")`. Its nodes have to be on this machine.
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

from gpuyard.core.cluster.offer import ClusterTerms
from gpuyard.core.lease import Need
from gpuyard.engines.cluster import engine as outpost
from gpuyard.engines.cluster.engine import ClusterEngine
from gpuyard.engines.cluster.site import Site
from gpuyard.ports import Ended, Engine, Launch, Prepared
from tests.contract.engine import DEADLINE_S, Programs, until
from tests.fakes.distant_site import SiteServer
from tests.fakes.site import ProcessSite

TERMS = ClusterTerms(need=Need(devices=0), name="contract")
ROOT = Path(__file__).parents[2]
# What a daemon does that is killed: all that it handed over was seen at the site, or nothing was handed over.
DAEMON = """
import os, select, signal, sys
import msgspec
from tests.contract.outposts import hasten, open_outpost
from gpuyard.ports import Launch
folder, maker, word, begins, launches = sys.argv[1:]
hasten()
engine = open_outpost(folder, maker, word)
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
    """What outposts wait for in seconds comes in hundredths; undone by what is returned."""
    quick = {"_TICK_S": 0.05, "_SOON_S": 0.02, "_FIRST_PAUSE_S": 0.04, "_LONGEST_PAUSE_S": 0.2}
    before = {name: getattr(outpost, name) for name in quick}

    def put(values: dict[str, float]) -> None:
        for name, value in values.items():
            setattr(outpost, name, value)

    put(quick)
    return lambda: put(before)


def open_outpost(folder: str, maker: str, word: str, on_news: Callable[[], None] = lambda: None) -> ClusterEngine:
    module, _, name = maker.partition(":")
    site: Site = getattr(importlib.import_module(module), name)(word)
    return ClusterEngine(site, Path(folder), on_news, poll_s=0.1)


class OutpostPlace(Programs):
    """Implements `Place`."""

    places_work = True

    def __init__(self, folder: Path, maker: str, word: str) -> None:
        super().__init__(folder)
        self.queue = folder / "queue"
        self._maker = maker
        self._word = word
        self._news = threading.Event()
        self._engines: list[ClusterEngine] = []
        self._orphans: list[psutil.Process] = []

    def engine(self) -> ClusterEngine:
        self._engines.append(open_outpost(str(self.queue), self._maker, self._word, self._news.set))
        return self._engines[-1]

    def launch(self, job_id: int, kind: str) -> Launch:
        return msgspec.structs.replace(super().launch(job_id, kind), engine="yonder", terms=TERMS)

    def ended(self, engine: Engine, count: int) -> list[Ended]:
        told = engine.ended()

        def has_all() -> bool:
            told.extend(engine.ended() if len(told) < count else ())
            return len(told) >= count

        until(has_all, f"{count} ends", every_s=0.02)
        return told

    def die(self, launches: Sequence[Launch], *, begun: bool) -> list[Prepared]:
        told = msgspec.json.encode(launches).decode()
        call = [sys.executable, "-c", DAEMON, str(self.queue), self._maker, self._word, "begin" if begun else "", told]
        ran = subprocess.run(call, cwd=ROOT, stdout=subprocess.PIPE, timeout=DEADLINE_S, check=False)
        assert ran.returncode == -signal.SIGKILL
        return msgspec.json.decode(ran.stdout, type=list[Prepared])

    def kill_supervisor(self, prepared: Prepared) -> None:
        key = f"{prepared.job_id}.{prepared.attempt}"
        for parcel in self.queue.glob("*/parcels/*/parcel.json"):
            for number, element in enumerate(json.loads(parcel.read_text())["elements"]):
                if element["key"] == key:
                    supervisor = psutil.Process(json.loads((parcel.parent / f"{number}.began").read_text())["pid"])
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
def process_place(folder: Path) -> Iterator[OutpostPlace]:
    """Over a site of real processes, which outlives daemons; those that are left end with it."""
    site = ProcessSite()
    server = SiteServer(site, str(folder / "site"))
    slow_again = hasten()
    place = OutpostPlace(folder, "tests.fakes.distant_site:DistantSite", str(folder / "site"))
    yield place
    place.close()
    slow_again()
    server.close()
    with server.lock:
        site.close()
