"""Tag sharing in the store: the rule in the lane, the last start of a tag, and stopped tags."""

from gpuyard.model.job_spec import TagSharing, Task
from gpuyard.store.job_store import JobStore
from tests.unit.store import QueueDb, attempt_of

RULE = TagSharing(most_per_device=4, stagger_s=1.0)
TASK = Task(workspace="/w", config="a b", owner="w-1/2", marker="/w/out/a b_completed.txt", record="/w/r.json")


def test_a_sharing_rule_and_its_tasks_are_read_back(queue_db: QueueDb) -> None:
    (first,) = queue_db.add(tag="w", tag_sharing=RULE, task=TASK)
    again = JobStore(queue_db.db)
    (queue,) = again.ready_queues()
    assert queue.lane.tag_sharing == RULE
    job = again.job(first)
    assert job is not None
    assert (job.spec.tag_sharing, job.spec.task) == (RULE, TASK)


def test_the_last_start_of_a_tag_counts_its_own_jobs(queue_db: QueueDb) -> None:
    first, second = queue_db.add(2, tag="w", tag_sharing=RULE)
    (other,) = queue_db.add(tag="other")
    assert queue_db.store.last_start_with_tag("w") is None
    for job_id, at in ((first, 300.0), (second, 200.0), (other, 900.0)):
        queue_db.store.start_attempt(attempt_of(job_id, at))
    assert queue_db.store.last_start_with_tag("w") == 300.0


def test_jobs_with_a_tag_are_listed_by_id_and_the_limit_keeps_the_newest(queue_db: QueueDb) -> None:
    queue_db.add(3, tag="w")
    queue_db.add(2, tag="other")
    queries = queue_db.queries
    assert [job.id for job in queries.with_tag("w", 10)] == [1, 2, 3]
    assert [job.id for job in queries.with_tag("w", 2)] == [2, 3]
    assert queries.with_tag("missing", 10) == []


def test_no_tag_is_stopped_by_default(queue_db: QueueDb) -> None:
    assert queue_db.store.stopped_tags() == frozenset()
    queue_db.store.set_setting("stopped_tags", '["w"]')
    assert JobStore(queue_db.db).stopped_tags() == {"w"}
