"""`gpuyard top` with a real daemon: marked jobs, and failed jobs only."""

from tests.integration.queue_fixture import QueueUnderTest
from tests.integration.test_top import Screen, watch


async def mark(screen: Screen, *jobs: int) -> None:
    """Select each of these jobs, from the first row down, and mark it."""
    for job in jobs:
        await screen.type("home")
        await screen.until(lambda: "Log  job" in screen.text, "a selected job")
        for _ in range(60):
            if f"Log  job {job} " in screen.text:
                break
            await screen.type("down")
        await screen.type("space")


def test_keys_act_on_all_marked_jobs(queue: QueueUnderTest) -> None:
    queue.post("/pause")
    one, two, three = (queue.shell(":", gpus="0", name=name) for name in ("one", "two", "three"))

    async def scenario(screen: Screen) -> None:
        await mark(screen, one, three)
        await screen.shows("2 marked", f"*{one:>3}", f"*{three:>3}")
        await screen.type("h")
        await screen.shows(f"held {one} {three}", "2 held")
        await screen.no_longer_shows("marked")
        assert queue.state(two) == "queued"
        await mark(screen, one, three)
        await screen.shows("release")
        await screen.no_longer_shows("h hold")
        await screen.type("h")
        await screen.shows("hold applies to none of the 2 marked jobs")
        await screen.type("plus", "plus")
        await screen.until(lambda: [queue.job(each)["priority"] for each in (one, two, three)] == [2, 0, 2], "2, 0, 2")
        await screen.type("c")
        await screen.shows(f"cancel {one} one and {three} three?")
        await screen.type("n")
        await screen.shows("no job changed", "2 marked")
        await screen.type("c", "y")
        await screen.shows(f"cancelled {one} {three}", "2 cancelled")
        await screen.no_longer_shows("marked")
        await screen.type("a")
        await screen.shows("3 marked")
        await screen.type("escape")
        await screen.no_longer_shows("marked")

    watch(scenario, (160, 30))
    assert [queue.state(job_id) for job_id in (one, two, three)] == ["cancelled", "queued", "cancelled"]


def test_jobs_that_a_filter_hides_are_unmarked(queue: QueueUnderTest) -> None:
    queue.post("/pause")
    first = queue.shell(":", gpus="0", array="0-39", name="filler")
    lemon, lime, plum = (queue.shell(":", gpus="0", name=name) for name in ("lemon", "lime", "plum"))

    async def scenario(screen: Screen) -> None:
        await mark(screen, lemon, lime, plum)
        await screen.shows("3 marked")
        await screen.type("slash", "l")  # more jobs than are loaded: the fillers, and all three
        await screen.shows("only 'l'", "43", "3 marked")
        await screen.type("m")
        await screen.shows("no job matches 'lm'")
        await screen.no_longer_shows("marked")
        await screen.type("backspace", "i", "m", "enter")
        await mark(screen, lime)
        await screen.shows("1 marked")
        await screen.type("escape")
        await screen.shows("plum", "1 marked")
        await screen.type("c")
        await screen.shows(f"cancel job {lime} lime?")
        await screen.type("y")
        await screen.shows(f"cancelled {lime}")

    watch(scenario, (80, 24))
    assert [queue.state(job_id) for job_id in (first, lemon, lime, plum)] == ["queued"] * 2 + ["cancelled", "queued"]


def test_the_marks_of_the_runs_of_a_sweep_go_when_it_is_closed(queue: QueueUnderTest) -> None:
    queue.post("/pause")
    first = queue.shell(":", gpus="0", array="0-39", name="filler")
    alone = queue.shell(":", gpus="0", name="alone")

    async def scenario(screen: Screen) -> None:
        await screen.shows(f"{first}-{first + 39}", "alone")
        await screen.type("enter")
        await mark(screen, first, first + 1)
        await screen.shows("2 marked")
        await screen.type("escape")
        await screen.shows("alone")
        await screen.no_longer_shows("marked")
        await screen.type("home", "space", "space")
        await screen.shows("41 marked")
        await screen.type("c")
        await screen.shows(f"cancel {first}-{first + 39} filler (40 jobs) and {alone} alone?")

    watch(scenario, (80, 24))


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
        await screen.shows("queued again 2-3", "No job failed; Esc shows all")
        await screen.no_longer_shows("marked")
        await screen.type("F")
        await screen.shows("--seed=0", "2 queued")

    watch(scenario, (140, 30))
    assert queue.counts() == {"queued": 2, "succeeded": 1}
