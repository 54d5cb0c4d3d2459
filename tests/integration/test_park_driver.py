"""A program that parks its memory, with a driver that refuses to move the rest."""

from pathlib import Path

import pytest

from gpuyard.engines.local.engine import LocalEngine
from gpuyard.engines.suspend.suspender import LocalSuspender
from gpuyard.model.job import OutcomeKind
from tests.integration.driver_fixture import CARD, Card, card, libraries, users_in
from tests.integration.engine_fixture import engine, folder, log_of, outcomes, wait_for
from tests.integration.suspend_fixture import is_stopped, nothing_is_left, resumed, script, suspended, suspender

__all__ = ["card", "engine", "folder", "libraries", "nothing_is_left", "suspender"]

pytestmark = pytest.mark.needs("cc")

# Uses the device of the fake driver, and parks between its steps until the file `finish` exists.
PARKING_USER = """
import os, time
from pathlib import Path
from gpuyard.scripting.park_tensors import ParkListener
from gpuyard.system.parking_protocol import own_attempt, path_of
state, me = Path(os.environ["FAKE_CUDA_STATE"]), os.getpid()
(state / f"{me}.new").write_text("0")
(state / f"{me}.new").rename(state / str(me))
def park():
    print("parked", flush=True)
    return 8 << 30
listener = ParkListener(path_of(*own_attempt(os.environ), me, 1), park, lambda: print("returned", flush=True))
print("using", me, flush=True)
while not (state / "finish").exists():
    listener.point()
    time.sleep(0.002)
"""


def test_a_program_that_has_parked_stays_suspended_even_if_the_driver_refuses_the_rest(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, card: Card
) -> None:
    attempt = script(engine, 1, PARKING_USER, devices=(CARD,))
    (user,) = users_in(folder, 1, 1)
    card.cuda.rule(f"Checkpoint {user} fail 801")
    moved = suspended(suspender, attempt)
    assert (moved.is_done, moved.parked_mb, moved.held_mb) == (True, 8192.0, {CARD: 8192.0})
    wait_for(lambda: is_stopped(user), "a stopped program")
    card.set_free(8000)
    assert not resumed(suspender, attempt, 8192).is_done
    card.set_free(8000, {user: 200})  # its context, which has to be there anyway
    assert resumed(suspender, attempt, 8192).is_done
    wait_for(lambda: "returned" in log_of(folder, 1), "its return")
    assert card.states([user]) == ["running"]
    card.finish()
    assert outcomes(engine)[1].kind is OutcomeKind.SUCCEEDED


def test_a_program_that_has_parked_is_not_resumed_before_its_memory_is_free(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, card: Card
) -> None:
    attempt = script(engine, 1, PARKING_USER, devices=(CARD,))
    (user,) = users_in(folder, 1, 1)
    assert suspended(suspender, attempt).is_done
    wait_for(lambda: is_stopped(user), "a stopped program")
    card.set_free(4096)
    moved = resumed(suspender, attempt, 8192)
    assert (moved.is_done, moved.is_ruined) == (False, False)
    assert "returned" not in log_of(folder, 1)
    card.set_free(80000)
    assert resumed(suspender, attempt, 8192).is_done
    card.finish()
    assert outcomes(engine)[1].kind is OutcomeKind.SUCCEEDED
