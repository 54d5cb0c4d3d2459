"""Programs that park their GPU memory themselves, on the command line: real jobs on simulated cards."""

from pathlib import Path

import pytest

from tests.fakes import gated_job, parking_job, parking_ranks
from tests.fakes.queue_command import run_here
from tests.integration.queue_fixture import QueueUnderTest, until

# Small enough for the RAM of any machine that runs tests.
RANK_MB, LARGE_MB = 600.0, 1500.0


def start(queue: QueueUnderTest, cards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUYARD_SIMULATE", cards)
    queue.home.mkdir(mode=0o700)
    (queue.home / "config.toml").write_text("[suspend]\nram_reserve_mb = 0\n")
    queue.start()


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return tmp_path / "gate"


def submit(memory_mb: float, *command: str, options: tuple[str, ...] = ()) -> str:
    result = run_here("submit", *options, "--vram", f"{memory_mb:g}M", "--", *command)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.strip()


def state_of(queue: QueueUnderTest, job_id: str) -> str:
    return str(queue.job(int(job_id))["state"])


def lines(queue: QueueUnderTest, job_id: str) -> list[str]:
    return queue.log_of(int(job_id), 1).splitlines()


def ranks(queue: QueueUnderTest, gate: Path, *options: str) -> str:
    """Submit two ranks, and wait until both work."""
    command = (*parking_ranks.COMMAND, "--vram", f"{RANK_MB:g}", *options, str(gate))
    job_id = submit(2 * RANK_MB, *command)
    until(lambda: state_of(queue, job_id) == "running", "the job")
    until(lambda: {"0 works", "1 works"} <= set(lines(queue, job_id)), "both ranks")
    return job_id


def test_ranks_of_a_job_park_together_when_it_is_suspended(
    own_queue: QueueUnderTest, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(own_queue, "1x2GB", monkeypatch)
    job_id = ranks(own_queue, gate)
    assert run_here("suspend", job_id).returncode == 0
    until(lambda: state_of(own_queue, job_id) == "suspended", "its suspension")
    assert run_here("resume", job_id).returncode == 0
    gate.touch()
    assert run_here("wait", job_id).returncode == 0
    assert "moved to RAM by the program itself in " in run_here("history", job_id).stdout
    assert sorted(line for line in lines(own_queue, job_id) if "works" not in line) == [
        "0 done", "0 parked", "0 returned", "1 done", "1 parked", "1 returned",
    ]  # fmt: skip


def test_the_history_says_why_a_registered_program_did_not_park(
    own_queue: QueueUnderTest, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(own_queue, "1x2GB", monkeypatch)
    job_id = ranks(own_queue, gate, "--unregistered")
    assert run_here("suspend", job_id).returncode == 0
    until(lambda: state_of(own_queue, job_id) == "suspended", "its suspension")
    assert "; the program did not park it: 1 of its 2 processes have called gpuyard.torch.parkable" in (
        run_here("history", job_id).stdout
    )
    assert run_here("resume", job_id).returncode == 0
    gate.touch()
    assert run_here("wait", job_id).returncode == 0


def test_an_urgent_job_on_an_amd_card_runs_beside_what_is_left_of_a_program_that_parks(
    own_queue: QueueUnderTest, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(own_queue, "amd:1x2GB", monkeypatch)
    size = f"{LARGE_MB:g}"
    parks = submit(LARGE_MB, *parking_job.COMMAND, "--vram", size, str(gate))
    until(lambda: state_of(own_queue, parks) == "running" and "holding" in lines(own_queue, parks), "its memory")
    gate.with_suffix(".urgent").touch()
    command = (*gated_job.COMMAND, "--vram", size, str(gate.with_suffix(".urgent")))
    urgent = submit(LARGE_MB, *command, options=("--preempt",))
    assert run_here("wait", urgent).returncode == 0
    gate.touch()
    assert run_here("wait", parks).returncode == 0
    assert lines(own_queue, parks) == ["holding", "parked", "returned", "done"]
    assert own_queue.job(int(parks))["attempt"] == 1, "it was not started again"


@pytest.mark.parametrize("need", [("--vram", "1990M"), ("--gpus", "1")], ids=["a share", "the whole GPU"])
def test_a_job_that_filled_its_card_resumes_beside_its_own_context(
    own_queue: QueueUnderTest, gate: Path, monkeypatch: pytest.MonkeyPatch, need: tuple[str, str]
) -> None:
    """Its context is in use, but not by others."""
    start(own_queue, "amd:1x2GB", monkeypatch)
    result = run_here("submit", *need, "--", *parking_job.COMMAND, "--vram", "1990", str(gate))
    job_id = result.stdout.strip()
    until(lambda: state_of(own_queue, job_id) == "running" and "holding" in lines(own_queue, job_id), "its memory")
    assert run_here("suspend", job_id).returncode == 0
    until(lambda: state_of(own_queue, job_id) == "suspended", "its suspension")
    assert run_here("resume", job_id).returncode == 0
    until(lambda: state_of(own_queue, job_id) == "running", "the job again")
    gate.touch()
    assert run_here("wait", job_id).returncode == 0


def test_a_program_that_cannot_park_is_not_suspended_on_an_amd_card(
    own_queue: QueueUnderTest, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(own_queue, "amd:1x2GB", monkeypatch)
    job_id = submit(LARGE_MB, *gated_job.COMMAND, "--vram", f"{LARGE_MB:g}", str(gate))
    until(lambda: state_of(own_queue, job_id) == "running", "the job")
    refused = run_here("suspend", job_id)
    assert refused.returncode != 0
    assert "SIM-amd-0 is no NVIDIA device" in refused.stderr
    assert "gpuyard.torch.parkable" in refused.stderr
    gate.touch()
    assert run_here("wait", job_id).returncode == 0
