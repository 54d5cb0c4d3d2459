"""Long commands: rows of lists carry the beginning; the job itself has all of it, and a search matches that."""

from tests.fakes.queue_command import run
from tests.integration.queue_fixture import QueueUnderTest


def test_rows_carry_a_short_command_and_a_search_matches_all_of_it(own_queue: QueueUnderTest) -> None:
    queue = own_queue
    queue.start()
    words = ["echo", *(f"--option-{number}" for number in range(300)), "--needle-at-the-end"]
    long = queue.submit(*words, gpus=0, hold=True)
    short = queue.submit("echo", "x", gpus=0, hold=True)
    rows = {row["id"]: row for row in queue.get("/jobs")["jobs"]}
    assert (len(rows[long]["command"]), rows[long]["command"][-1], rows[long]["is_command_cut"]) == (240, "…", True)
    assert (rows[short]["command"], rows[short]["is_command_cut"]) == ("echo x", False)
    whole = queue.job(long)
    assert (whole["command"], whole["is_command_cut"]) == (" ".join(words), False)
    assert [row["id"] for row in queue.get("/jobs", search="needle-at")["jobs"]] == [long]
    assert "--needle-at-the-end" in run("show", str(long)).stdout


def test_a_list_of_long_commands_is_small(own_queue: QueueUnderTest) -> None:
    queue = own_queue
    queue.start()
    queue.submit("echo", "x" * 5000, gpus=0, hold=True, array="1-100")
    rows = queue.get("/jobs", limit="100")["jobs"]
    assert len(rows) == 100
    assert sum(len(row["command"]) for row in rows) == 100 * 240
