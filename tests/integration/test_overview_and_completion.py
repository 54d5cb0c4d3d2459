"""`gpuyard` alone, and what shells complete, with a real daemon and without one."""

from pathlib import Path

import pytest

from tests.fakes.queue_command import run, run_on_terminal
from tests.integration.queue_fixture import QueueUnderTest


def complete(monkeypatch: pytest.MonkeyPatch, shell: str, words: str) -> list[str]:
    """Return what the shell would offer for the last word."""
    monkeypatch.setenv("_GPUYARD_COMPLETE", f"{shell}_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    _, *others = words.split(" ")
    monkeypatch.setenv("COMP_CWORD", others[-1] if shell == "fish" else str(len(others)))
    result = run()
    assert (result.returncode, result.stderr) == (0, "")
    lines = [line for line in result.stdout.splitlines() if line]
    return lines[1::3] if shell == "zsh" else [line.split("\t")[0].partition(",")[2] for line in lines]


def test_on_a_terminal_the_gpus_and_the_queue_are_shown_and_in_a_pipe_the_help(queue: QueueUnderTest) -> None:
    queue.submit("true", gpus=0, hold=True, name="later")
    shown = run_on_terminal(columns=100)
    assert "Simulated" in shown
    assert "later" in shown
    assert "idle" in shown
    assert "Usage: gpuyard" in run().stderr  # as before: without a command there is nothing to do
    queue.post("/jobs/cancel", ids="all")


def test_without_a_daemon_the_gpus_are_shown_and_none_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUYARD_HOME", str(tmp_path))
    monkeypatch.setenv("GPUYARD_SIMULATE", "1x24GB")
    shown = run_on_terminal(columns=100)
    assert "Simulated" in shown
    assert "No queue is running" in shown
    assert not (tmp_path / "daemon.lock").exists()
    assert complete(monkeypatch, "bash", "gpuyard logs ") == []
    assert complete(monkeypatch, "bash", "gpuyard queue --state fa") == ["failed"]
    assert not (tmp_path / "daemon.lock").exists()


def test_ids_states_tags_and_values_of_options_are_completed(
    queue: QueueUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.shell("exit 1", gpus=0, tag="night", name="train")
    queue.submit("true", gpus=0, tag="day")
    queue.wait()
    for shell in ("bash", "zsh", "fish"):
        assert complete(monkeypatch, shell, "gpuyard logs ") == ["2", "1"]
        assert complete(monkeypatch, shell, "gpuyard retry sta") == ["state="]
        assert complete(monkeypatch, shell, "gpuyard retry state=fa") == ["state=failed"]
        assert complete(monkeypatch, shell, "gpuyard retry tag=") == ["tag=day", "tag=night"]
        assert complete(monkeypatch, shell, "gpuyard cancel state=queued,he") == ["state=queued,held"]
        assert complete(monkeypatch, shell, "gpuyard submit --tag ni") == ["night"]
        assert complete(monkeypatch, shell, "gpuyard submit --on-preempt r") == ["requeue"]
        assert complete(monkeypatch, shell, "gpuyard submit --after 1") == ["1"]
    assert complete(monkeypatch, "bash", "gpuyard retry state = fa") == ["failed"]
    assert complete(monkeypatch, "bash", "gpuyard retry tag =") == ["day", "night"]
    for name in ("_GPUYARD_COMPLETE", "COMP_WORDS", "COMP_CWORD"):
        monkeypatch.delenv(name)
