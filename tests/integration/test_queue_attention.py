"""Changes that the daemon must notice: a finished wait, an end during its absence, an edited configuration."""

import stat
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from gpuyard.engines.local.engine import LocalEngine
from gpuyard.ledger.ledger import Ledger, QueueLedger, open_ledger
from gpuyard.model.lease import Claim, Share
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Device, Host, Sample, Snapshot, Vendor
from gpuyard.model.selection import JobSelection, parse_selection
from gpuyard.model.submission import SubmissionRequest, parse_submission
from gpuyard.policy.world import SchedulingLimits
from gpuyard.queue.configured_rules import Rules
from gpuyard.queue.step import Controller
from gpuyard.queue.user_requests import UserRequests
from gpuyard.store.database import open_database
from gpuyard.store.job_store import JobStore
from gpuyard.store.queue_queries import QueueQueries
from gpuyard.system.clock import wall_time_of
from gpuyard.system.processes import this_process
from tests.fakes.clock import FakeClock
from tests.fakes.no_suspender import NoSuspender
from tests.integration.queue_fixture import QueueUnderTest, until

pytestmark = pytest.mark.usefixtures("unmeasured")


def test_cancelling_a_job_removes_its_ticket(queue: QueueUnderTest) -> None:
    ledger = open_ledger()
    claim = Claim(shares=(Share(device_id="SIM-0"),))
    held = ledger.claim(this_process("a script"), lambda leases, tickets: claim, timeout_s=90)
    assert held is not None
    job_id = queue.submit("true", gpus=2)
    until(lambda: [ticket.need.devices for ticket in ledger.contents().tickets] == [2], "its ticket")
    queue.post("/jobs/cancel", ids=str(job_id))
    until(lambda: not ledger.contents().tickets, "the end of its ticket")
    held.release()


def test_waiting_for_all_jobs_ignores_those_already_finished(queue: QueueUnderTest) -> None:
    queue.wait(queue.shell("exit 3", gpus=0))
    job_id, gate = queue.start_gated(gpus=0)
    answer = queue.get("/wait", timeout="0")
    assert (answer["done"], answer["selection"]) == (False, str(job_id))
    gate.write_text("go\n")
    answer = queue.get("/wait", ids=answer["selection"], timeout="30")
    assert (answer["done"], answer["failed_count"]) == (True, 0)


def test_the_time_without_a_daemon_is_not_added_to_a_jobs_duration(queue: QueueUnderTest) -> None:
    job_id, gate = queue.start_gated(gpus=0)
    queue.kill9()
    gate.write_text("go\n")
    journal = queue.home / "journal"
    until(lambda: f"{job_id}.1 " in journal.read_text().rpartition("began")[2], "its end in the journal")
    ended = wall_time_of(float(journal.read_text().split()[-2]))
    queue.start()
    queue.wait(job_id)
    elapsed = queue.job(job_id)["elapsed_s"]
    assert elapsed == pytest.approx(ended - _started(queue, job_id), abs=0.01)


def _started(queue: QueueUnderTest, job_id: int) -> float:
    return datetime.fromisoformat(queue.job(job_id)["started_at"]).timestamp()


def test_no_more_than_its_cap_is_kept_of_a_log_that_is_written_at_full_speed(queue: QueueUnderTest) -> None:
    job_id = queue.shell("yes | head -c 200000000; echo the end", gpus=0, log_cap="1M")
    queue.wait(job_id)
    logs = list((queue.home / "logs").glob(f"{job_id}.1.log*"))
    assert sum(each.stat().st_blocks * 512 for each in logs) <= 2 << 20
    answer = queue.get(f"/jobs/{job_id}/log", tail="20")
    assert (answer["text"], answer["is_cut"]) == ("y\ny\ny\ny\ny\ny\nthe end\n", True)


def test_the_daemon_applies_an_edited_configuration(own_queue: QueueUnderTest) -> None:
    own_queue.home.mkdir(exist_ok=True)
    config = own_queue.home / "config.toml"
    config.write_text("[queue.tags]\nnight = 0\n")
    own_queue.start()
    job_id = own_queue.submit("true", gpus=0, tag="night")
    until(lambda: "their limit is 0" in own_queue.why(job_id), "the limit, once the disks have been read")
    config.write_text("[queue.tags]\nnight = 2\n")

    def has_run() -> bool:
        own_queue.submit("true", gpus=0)  # makes the daemon take a step
        return own_queue.state(job_id) == "succeeded"

    until(has_run, "the end of a job with a tag that may run now")


def test_an_existing_home_keeps_its_mode_and_new_files_in_it_are_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    LocalEngine(tmp_path).close()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path, *tmp_path.iterdir())}
    assert modes.pop(tmp_path.name) == 0o755
    assert set(modes.values()) == {0o700, 0o600}


@pytest.fixture
def controlled(tmp_path: Path) -> Iterator[tuple[Controller, UserRequests, JobStore]]:
    """A queue without a daemon: the test calls step() itself."""
    database, _ = open_database(None)
    store, clock, me = JobStore(database), FakeClock(), this_process("queue")
    engine = LocalEngine(tmp_path / "queue")
    until(engine.is_ready, "the keeper")
    (tmp_path / "locks").mkdir(mode=0o700)
    rules = Rules(limits=SchedulingLimits(cpu_jobs=1))
    ledger = QueueLedger(Ledger(tmp_path / "locks"), me)
    controller = Controller(store, ledger, engine, clock, rules=rules, me=me, suspender=NoSuspender())
    yield controller, UserRequests(controller, store, QueueQueries(database, store), clock), store
    engine.close()
    database.close()


def test_a_job_on_a_machine_without_devices_waits_for_a_new_sample(
    controlled: tuple[Controller, UserRequests, JobStore],
) -> None:
    controller, requests, _ = controlled
    list(requests.submit(parse_submission(SubmissionRequest(cwd="/", environment={}, command=("true",))), "me"))
    step = controller.step(Sample(snapshot=Snapshot(taken_at=0.0, host=Host())))
    assert (step.waits_for_sample, step.started) == (True, 0)
    list(requests.change(parse_selection("1"), requests.cancel))
    step = controller.step(Sample(snapshot=Snapshot(taken_at=0.0, host=Host())), is_fresh=False)
    assert not step.waits_for_sample, "no job waits any more"


def test_a_job_that_waits_for_a_lease_needs_no_new_sample(
    controlled: tuple[Controller, UserRequests, JobStore],
) -> None:
    controller, requests, _ = controlled
    options = {"array": "0-1", "vram": "20G"}
    asked = SubmissionRequest(cwd="/", environment={}, command=("sleep", "600"), options=options)
    list(requests.submit(parse_submission(asked), "me"))
    card = Device(id="G0", vendor=Vendor.NVIDIA, index=0, memory_total_mb=24e3, memory_used_mb=0.0, memory_free_mb=24e3)
    empty = Snapshot(taken_at=0.0, host=Host(), devices=(card,))
    step = controller.step(Sample(snapshot=empty))
    assert (step.started, step.waits_for_devices, step.waits_for_sample) == (1, True, False)
    list(requests.change(parse_selection("all"), requests.cancel))
    controller.step(Sample(snapshot=empty))


def test_cancelling_queued_jobs_skips_one_that_was_held_meanwhile(
    controlled: tuple[Controller, UserRequests, JobStore],
) -> None:
    _, requests, store = controlled
    asked = SubmissionRequest(cwd="/", environment={}, command=("true",), options={"array": "0-2"})
    list(requests.submit(parse_submission(asked), "me"))
    list(requests.change(parse_selection("2"), requests.hold))
    list(requests.change(JobSelection(ranges=((1, 3),), states=(JobState.QUEUED,)), requests.cancel))
    states = [job.state for number in (1, 2, 3) if (job := store.job(number)) is not None]
    assert states == [JobState.CANCELLED, JobState.HELD, JobState.CANCELLED]


def test_a_stopped_daemon_leaves_its_jobs_running(queue: QueueUnderTest) -> None:
    job_id, gate = queue.start_gated(gpus=0)
    queue.stop()
    gate.write_text("go\n")
    queue.start()
    assert queue.wait(job_id)["succeeded"] == 1


def test_a_stopped_daemon_leaves_its_database_as_one_file(queue: QueueUnderTest) -> None:
    queue.wait(queue.submit("true", gpus=0))
    assert queue.get("/jobs", search="true")["total"] == 1
    assert queue.get("/report")["total"]["jobs"] == 1
    queue.stop()
    assert [each.name for each in queue.home.glob("queue.db*")] == ["queue.db"]
