"""`gpuyard top` with a real daemon: marked jobs, and failed jobs only."""

from tests.integration.queue_fixture import QueueUnderTest
from tests.integration.test_top import Screen, watch


def test_keys_act_on_all_marked_jobs(queue: QueueUnderTest) -> None:
    queue.post("/pause")
    one, two, three = (queue.shell(":", gpus="0", name=name) for name in ("one", "two", "three"))

    async def scenario(screen: Screen) -> None:
        await screen.chooses(one)
        await screen.type("space", "down", "space")
        await screen.shows("2 marked", f"*{one:>3}", f"*{three:>3}")
        await screen.type("h")
        await screen.shows(f"held {one} {three}", "2 held", "2 marked")
        assert queue.state(two) == "queued"
        await screen.shows("release")
        await screen.no_longer_shows("h hold")
        await screen.type("h")
        await screen.shows("hold applies to none of the 2 marked jobs")
        await screen.type("plus")
        await screen.until(lambda: [queue.job(each)["priority"] for each in (one, two, three)] == [1, 0, 1], "1, 0, 1")
        await screen.type("c")
        await screen.shows("cancel 2 jobs?")
        await screen.type("y")
        await screen.shows(f"cancelled {one} {three}", "2 cancelled", "t retry")
        await screen.type("escape")
        await screen.no_longer_shows("2 marked")
        await screen.type("a")
        await screen.shows("3 marked")

    watch(scenario, (160, 30))
    assert [queue.state(job_id) for job_id in (one, two, three)] == ["cancelled", "queued", "cancelled"]


def test_a_key_shows_only_failed_jobs_with_their_arguments(queue: QueueUnderTest) -> None:
    for number in range(3):
        queue.submit("sh", "-c", f"exit {number}", "run", f"--seed={number}", gpus="0", name="night")
    queue.wait()

    async def scenario(screen: Screen) -> None:
        await screen.shows("--seed=0", "--seed=1", "--seed=2")
        await screen.type("F")
        await screen.shows("failed only", "--seed=1", "--seed=2")
        await screen.no_longer_shows("--seed=0")
        await screen.type("a")
        await screen.shows("2 marked")
        queue.post("/pause")
        await screen.type("t")
        await screen.shows("queued again 2-3", "No job failed; Esc shows all", "2 marked", "c cancel")
        await screen.type("F")
        await screen.shows("--seed=0", "2 queued")

    watch(scenario, (140, 30))
    assert queue.counts() == {"queued": 2, "succeeded": 1}
