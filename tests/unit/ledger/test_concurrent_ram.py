"""Claims of RAM by many threads on one ledger, in any order: never more than the machine has without its floor."""

import random
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuyard.ledger.ledger import Ledger
from gpuyard.model.lease import Claim, HostShare, Lease, Need, Ticket
from gpuyard.model.machine_snapshot import Host, Snapshot
from gpuyard.policy.machine import Machine
from gpuyard.policy.placement import choose
from gpuyard.system.processes import this_process

GB = 1024.0
HOST = Host(memory_total_mb=23 * GB, memory_available_mb=23 * GB)
SNAPSHOT = Snapshot(taken_at=1.0, host=HOST)


def reserved_mb(ledger: Ledger) -> float:
    return sum(lease.host.ram_mb or 0.0 for lease in ledger.leases() if lease.host is not None)


@pytest.mark.parametrize("seed", range(5))
def test_concurrent_claims_never_exceed_the_ram_without_the_floor(tmp_path: Path, seed: int) -> None:
    most: list[float] = []
    failures: list[BaseException] = []

    def work(number: int) -> None:
        ledger, chance = Ledger(tmp_path), random.Random(seed * 100 + number)
        me = replace(this_process(), label=str(number))
        try:
            for _ in range(6):
                need = Need(devices=0, host=HostShare(ram_mb=chance.choice([1, 3, 8, 13, 30]) * GB))

                def decide(leases: tuple[Lease, ...], _: tuple[Ticket, ...], need: Need = need) -> Claim | None:
                    return choose(need, Machine(now=1.0, snapshot=SNAPSHOT, leases=leases)).claim

                held = ledger.claim(me, decide, 60.0)
                most.append(reserved_mb(ledger))
                if held is not None:
                    held.release()
        except BaseException as error:  # noqa: BLE001 - the test reports it
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90.0)
    assert not failures
    assert len(most) == 48
    assert max(most) > 8 * GB, "some ran side by side, or one of 13 GB ran"
    assert max(most) <= 21 * GB
