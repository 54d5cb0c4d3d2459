"""What is done to many jobs is done to those that are meant when it is done."""

from pathlib import Path

from gpuyard.control.controller import Controller
from gpuyard.control.requests import Requests
from gpuyard.control.words import Rules
from gpuyard.core.lifecycle import JobState
from gpuyard.core.policy import Limits
from gpuyard.core.selection import Selection, parse_selection
from gpuyard.core.submission import Asked, parse_submission
from gpuyard.engines.local import LocalEngine
from gpuyard.leases.book import Book
from gpuyard.leases.identity import this_process
from gpuyard.leases.ledger import Ledger
from gpuyard.store.catalogue import Catalogue
from gpuyard.store.database import open_database
from gpuyard.store.jobs import JobStore
from tests.fakes.clock import FakeClock


def test_a_job_whose_state_is_no_longer_the_one_that_was_asked_for_stays_as_it_is(tmp_path: Path) -> None:
    database, _ = open_database(None)
    store, clock, me = JobStore(database), FakeClock(), this_process("queue")
    engine = LocalEngine(tmp_path / "queue")
    (tmp_path / "locks").mkdir(mode=0o700)
    rules = Rules(limits=Limits(cpu_jobs=1))
    controller = Controller(store, Book(Ledger(tmp_path / "locks"), me), engine, clock, rules=rules, me=me)
    requests = Requests(controller, store, Catalogue(database, store), clock)
    asked = Asked(cwd="/", environment={}, command=("true",), options={"array": "0-2"})
    list(requests.submit(parse_submission(asked), "me"))
    list(requests.hold(parse_selection("2")))
    list(requests.cancel(Selection(ranges=((1, 3),), states=(JobState.QUEUED,))))
    states = [job.state for number in (1, 2, 3) if (job := store.job(number)) is not None]
    assert states == [JobState.CANCELLED, JobState.HELD, JobState.CANCELLED]
    engine.close()
    database.close()
