"""Sweeps through the command line and a real daemon: checked before they are stored, folded, and shown as a table."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuyard.client.client import Client
from tests.fakes.queue_command import run_here
from tests.integration.queue_fixture import end_leftovers


@pytest.fixture(autouse=True)
def queue(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GPUYARD_SIMULATE", "2x24GB")
    yield
    end_leftovers(own_home)


def read(*arguments: str) -> Any:
    result = run_here(arguments[0], "--json", *arguments[1:])
    assert (result.returncode, result.stderr) == (0, "")
    return json.loads(result.stdout)


def lines(*arguments: str) -> list[list[str]]:
    result = run_here(*arguments)
    assert (result.returncode, result.stderr) == (0, "")
    return [line.split() for line in result.stdout.splitlines()]


def test_a_mistake_and_a_dry_run_submit_nothing() -> None:
    wrong = run_here("submit", "--sweep", "lr=1..3", "--", "echo", "{LR}")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "did you mean {lr}?" in wrong.stderr
    unused = run_here("submit", "--dry-run", "--sweep", "lr=1..3", "--", "echo")
    assert unused.returncode == 2
    assert "no placeholder uses the values of --sweep lr" in unused.stderr
    sweep = ("--sweep", "lr=1e-3..1e-1:log3", "--sweep", "x=7", "--", "echo", "{lr}{x}")
    assert lines("submit", "--dry-run", *sweep)[1:] == [
        ["lr", "COMMAND"], ["1e-3", "echo", "1e-37"], ["1e-2", "echo", "1e-27"], ["1e-1", "echo", "1e-17"],
    ]  # fmt: skip
    array = read("submit", "--dry-run", "--array", "0-2999", "--", "echo", "{index}")
    assert (array["count"], len(array["jobs"]), array["jobs"][2]["command"]) == (3000, 1000, "echo 2")
    assert read("submit", "--dry-run", "--", "echo", "{a}")["jobs"][0]["command"] == "echo '{a}'"
    assert run_here("submit", "--dry-run", "--gpus", "9", "--", "true").returncode == 4
    assert run_here("submit", "--dry-run", "--after", "99", "--", "true").returncode != 0
    assert read("queue")["jobs"] == []


def test_a_sweep_is_one_line_that_opens_into_a_table_of_its_runs() -> None:
    script = "echo $GPUYARD_SWEEP_LR $RATE; [ {seed} != 1 ]"
    sweep = ("--sweep", "lr=2,1e1", "--sweep", "seed=0..1", "--env", "RATE=r{lr}", "--name", "tune")
    assert lines("submit", "--gpus", "0", *sweep, "--", "sh", "-c", script) == [["1-4"]]
    run_here("submit", "--gpus", "0", "--array", "0-9", "--hold", "--", "echo", "{index}")
    assert run_here("wait", "1-4").returncode == 5
    _, _, held, done = lines("queue")
    assert (held[:2], held[-3:]) == (["5-14", "held"], ["submitted", "as", "held"])
    assert (done[:3], done[-4:]) == (["1-4", "failed", "tune"], ["4/4", "done,", "2", "failed"])
    _, _, heading, *runs = lines("queue", "--sweep", "3", "--sort", "-lr")
    assert heading[:4] == ["ID", "lr", "seed", "STATE"]
    assert [each[:4] for each in runs] == [
        ["3", "1e1", "0", "succeeded"], ["4", "1e1", "1", "failed"],
        ["1", "2", "0", "succeeded"], ["2", "2", "1", "failed"],
    ]  # fmt: skip
    assert [each[0] for each in lines("queue", "--sweep", "1", "--state", "failed")[3:]] == ["2", "4"]
    assert lines("logs", "3") == [["1e1", "r1e1"]]
    jobs = {job["id"]: job for job in read("queue", "--all")["jobs"]}
    assert (len(jobs), jobs[3]["values"], jobs[3]["group"]) == (14, {"lr": "1e1", "seed": "0"}, None)
    assert any("tune" in each and "lr=2" in each for each in lines("queue", "1-4"))
    for mistake in (["--sweep", "x"], ["--sweep", "1", "--sort", "sed"], ["--sort", "lr"], ["--sweep", "99"]):
        assert run_here("queue", *mistake).returncode != 0, mistake


def test_the_line_of_a_waiting_array_has_the_memory_that_its_jobs_would_get() -> None:
    """Not `alone`: jobs without a declared size share a GPU."""
    run_here("submit", "--gpus", "2", "--", "sleep", "60")
    run_here("submit", "--array", "0-3", "--", "true")
    run_here("submit", "--array", "0-3", "--vram", "7G", "--", "true")
    run_here("submit", "--array", "0-3", "--exclusive", "--", "true")
    shown = [" ".join(line) for line in lines("queue")]
    opened = [" ".join(line) for line in lines("queue", "--open")]
    for first, last in ((2, 5), (6, 9), (10, 13)):
        folded = next(line for line in shown if line.startswith(f"{first}-{last} queued"))
        single = next(line for line in opened if line.startswith(f"{first} queued"))
        assert folded.split()[4:6] == single.split()[4:6]
    run_here("cancel", "all")


def test_without_arrays_the_folded_queue_is_the_queue() -> None:
    assert run_here("pause").returncode == 0
    with Client() as client:
        for number in range(23):
            client.submit("echo", str(number), gpus=0, priority=number % 3, hold=number % 4 == 0)
        plain, folded = client.queue(limit=20), client.queue(limit=20, fold=True)
        assert [row.id for row in folded.jobs] == [row.id for row in plain.jobs]
        assert (folded.next, folded.total) == (plain.next, plain.total) == (20, 23)
        client.submit("echo", "{index}", array="0-1", gpus=0, hold=True)
        again = client.queue(limit=20, fold=True)
        assert ([row.id for row in again.jobs], again.total) == ([row.id for row in plain.jobs], 24)


def test_scripts_read_the_table_and_the_folded_queue() -> None:
    with Client() as client:
        options: dict[str, Any] = {"gpus": 0, "hold": True, "sweep": ["a=0..99", "b=0..99"]}
        preview = client.preview("echo", "{a}{b}", sample=5, seed=3, **options)
        assert (preview.count, preview.varies) == (5, ("a", "b"))
        client.submit("echo", "{a}{b}", sample=5, seed=3, **options)
        (row,) = client.queue(fold=True).jobs
        assert row.group is not None
        assert (row.id, row.group.ids, row.group.text, row.command) == (1, "1-5", "0/5 done, 5 held", "echo {a}{b}")
        table = client.sweep(2, sort="-b", limit=2)
        assert (table.total, table.next, [column.name for column in table.columns][:2]) == (5, 2, ["a", "b"])
        assert {each.values["b"] for each in table.jobs} <= {each.values["b"] for each in preview.jobs}
        tabled = client.submit("echo", "{x}", table="x,note\n1,same\n2,same\n", gpus=0, hold=True)
        assert client.show(tabled.first).varies == ("x",)
