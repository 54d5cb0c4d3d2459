"""Many processes, few devices, random kills: leases never conflict, and every request is granted.

Each worker writes its events into its own file, with times of a clock that all processes share. The recorded span of a
lease lies within the real one: a worker records a grant after it, a release before it, and the test records the time of
a kill before it kills.

GPUYARD_CHAOS=processes,acquisitions sets the size.
"""

import contextlib
import math
import os
import random
import signal
import sys
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from pathlib import Path

import msgspec
import pytest
from msgspec import Struct

from gpuyard.ledger.ledger import Ledger
from gpuyard.ledger.wait_for_devices import Acquisition
from gpuyard.model.lease import FixedMemory, Need
from gpuyard.model.machine_snapshot import Host, Snapshot
from gpuyard.probes.simulated_devices import SimulatedDevices, SimulatedUse
from tests.unit.ledger import DEADLINE_S, ME, context, nothing

PROCESSES, ACQUISITIONS = map(int, os.environ.get("GPUYARD_CHAOS", "8,200").split(","))
KILLS = ACQUISITIONS // 10
# A later ticket may be granted before an earlier one that is granted at the same moment on another device.
MOST_OVERTAKES = 2 * PROCESSES
DEVICES, CARD_MB = 4, 24 * 1024.0
LONGEST_HOLD_S, LONGEST_WAIT_S = 0.02, 120.0
NEEDS = (
    Need(),
    Need(devices=2),
    Need(memory=FixedMemory(16 * 1024.0)),
    Need(memory=FixedMemory(8 * 1024.0)),
    Need(memory=FixedMemory(6 * 1024.0), devices=2),
)


class Event(Struct, frozen=True, kw_only=True):
    what: str
    at: float
    need: int
    devices: tuple[str, ...] = ()
    had_at: float = 0.0


class Held(Struct, frozen=True, kw_only=True):
    """One acquisition from request to end. `had`: when the ledger granted it; `granted`: when that was recorded."""

    need: int
    asked: float
    in_queue_order: float
    had: float
    granted: float
    ended: float
    devices: tuple[str, ...]


class Diary:
    """The events of a worker; waiting is not recorded."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._last = ""

    def write(self, what: str, need: int, devices: tuple[str, ...] = (), had_at: float = 0.0) -> None:
        if what != self._last:
            event = Event(what=what, at=time.monotonic(), need=need, devices=devices, had_at=had_at)
            os.write(self._descriptor, msgspec.json.encode(event) + b"\n")
        self._last = what


def work(folder: Path, log: Path, quota: int, seed: int) -> None:
    """Acquire and release `quota` times."""
    dice, diary = random.Random(seed), Diary(log)
    devices = SimulatedDevices(f"{DEVICES}x24GB", folder / "simulated")
    for _ in range(quota):
        take_and_give_back(Ledger(folder / "ledger"), devices, diary, dice)


def take_and_give_back(ledger: Ledger, devices: SimulatedDevices, diary: Diary, dice: random.Random) -> None:
    number = dice.randrange(len(NEEDS))
    need = NEEDS[number]
    diary.write("ask", number)
    acquisition = Acquisition(
        ledger, lambda: Snapshot(taken_at=None, host=Host(), devices=devices.read(1.0).devices), need
    )
    lease = acquisition.wait(LONGEST_WAIT_S, 1.0, lambda _: diary.write("wait", number))
    ids = tuple(share.device_id for share in lease.lease.shares)
    diary.write("grant", number, ids, time.monotonic() - (time.time() - lease.lease.since))
    with SimulatedUse(devices) as usage:
        for device_id in ids:
            usage.allocate(device_id, need.required_mb or CARD_MB)
        time.sleep(dice.uniform(0, LONGEST_HOLD_S))
    diary.write("release", number)
    lease.release()


class Worker:
    def __init__(self, folder: Path, name: str, quota: int) -> None:
        self.log = folder / f"{name}.log"
        self.quota = quota
        self.process = context.Process(
            target=work, args=(folder, self.log, quota, zlib.crc32(name.encode())), daemon=True
        )
        self.process.start()
        self.killed_at: float | None = None

    def events(self) -> list[Event]:
        with contextlib.suppress(FileNotFoundError):
            written = self.log.read_bytes()
            whole = written[: written.rfind(b"\n") + 1]  # the last line may be incomplete
            return [msgspec.json.decode(line, type=Event) for line in whole.splitlines()]
        return []

    def is_at(self, what: str) -> bool:
        """Read only the end of the file, because this is called often."""
        with contextlib.suppress(FileNotFoundError), self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 100))
            return f'"what":"{what}"'.encode() in file.read().rstrip(b"\n").rpartition(b"\n")[2]
        return False

    def kill(self) -> None:
        assert self.process.pid is not None
        self.killed_at = time.monotonic()
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(DEADLINE_S)

    def left(self) -> int:
        return self.quota - sum(event.what == "grant" for event in self.events())

    def history(self) -> Iterator[Held]:
        asked, in_queue_order, grant = 0.0, 0.0, None
        for event in self.events():
            if event.what == "ask":
                asked = in_queue_order = event.at
            elif event.what == "wait":
                in_queue_order = event.at
            elif event.what == "grant":
                grant = event
            elif event.what == "release" and grant is not None:
                yield held(asked, in_queue_order, grant, event.at)
                grant = None
        if grant is not None and self.killed_at is not None:
            yield held(asked, in_queue_order, grant, max(grant.at, self.killed_at))


def held(asked: float, in_queue_order: float, grant: Event, ended: float) -> Held:
    return Held(
        need=grant.need, asked=asked, in_queue_order=in_queue_order, had=grant.had_at, granted=grant.at, ended=ended,
        devices=grant.devices,
    )  # fmt: skip


def run_and_kill(folder: Path, dice: random.Random) -> list[Worker]:
    """All workers so far. For each killed worker another one does the rest of its work."""
    alive = [Worker(folder, f"worker-{place}", math.ceil(ACQUISITIONS / PROCESSES)) for place in range(PROCESSES)]
    workers = list(alive)
    kills = 0
    while alive:
        connection.wait([worker.process.sentinel for worker in alive], timeout=dice.uniform(0, 0.05))
        alive = [worker for worker in alive if worker.process.exitcode is None]
        victims = [worker for worker in alive if worker.is_at("grant" if kills % 2 else "wait")]
        if victims and kills < KILLS:
            victim = dice.choice(victims)
            victim.kill()
            kills += 1
            alive.remove(victim)
            if victim.left() > 0:
                alive.append(Worker(folder, f"worker-{len(workers)}", victim.left()))
                workers.append(alive[-1])
    return workers


def assert_no_overlap(histories: Sequence[Held]) -> None:
    """Check that an exclusive lease is alone, and that shared leases never exceed the memory of the device."""
    # At the same instant, an end sorts before a beginning.
    changes = sorted((at, begins, place) for place, one in enumerate(histories) for at, begins in times(one))
    on_device: dict[str, set[int]] = defaultdict(set)
    for _, begins, place in changes:
        for device_id in histories[place].devices:
            here = on_device[device_id]
            here.add(place) if begins else here.remove(place)
            needs = [NEEDS[histories[one].need] for one in here]
            assert len(needs) < 2 or not any(need.is_exclusive for need in needs), "an exclusive lease is not alone"
            assert sum(need.required_mb or 0.0 for need in needs) <= CARD_MB, "more was promised than there is"


def times(one: Held) -> tuple[tuple[float, bool], tuple[float, bool]]:
    return (one.granted, True), (one.ended, False)


def most_overtakes(histories: Sequence[Held]) -> int:
    """Return the largest number of later requests with an equal need that overtook one request."""
    return max(
        sum(other.need == one.need and other.asked > one.in_queue_order and other.had < one.had for other in histories)
        for one in histories
        if one.in_queue_order > one.asked
    )


@pytest.mark.timeout(1800)
def test_under_random_kills_leases_never_conflict_and_every_request_is_granted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger(tmp_path / "ledger")
    ledger.folder.mkdir()
    started = time.monotonic()
    workers = run_and_kill(tmp_path, random.Random(20240229))
    took_s = time.monotonic() - started

    histories = [one for worker in workers for one in worker.history()]
    assert_no_overlap(histories)

    survivors = [worker for worker in workers if worker.killed_at is None]
    assert [worker.process.exitcode for worker in survivors] == [0] * len(survivors)
    assert [worker.left() for worker in survivors] == [0] * len(survivors)

    died_as = Counter(worker.events()[-1].what for worker in workers if worker.killed_at is not None)
    assert died_as["grant"] > 0, "no holder was killed"
    assert died_as["wait"] > 0, "no waiter was killed"
    overtakes = most_overtakes(histories)
    with capsys.disabled():
        sys.stdout.write(
            f"\n{PROCESSES} processes, {len(histories)} acquisitions in {took_s:.1f} s; killed: {died_as['grant']} "
            f"that held, {died_as['wait']} that waited, {died_as['release'] + died_as['ask']} between; "
            f"overtaken at most {overtakes} times\n"
        )
    assert overtakes <= MOST_OVERTAKES

    assert ledger.claim(ME, nothing, DEADLINE_S) is None
    assert [path.name for path in ledger.folder.iterdir()] == []
