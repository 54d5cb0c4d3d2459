"""The code that was submitted is the code that runs: real work trees, real jobs, daemons that are killed."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.fakes.deep_folders import deep_folders
from tests.fakes.queue_command import GPUYARD, run
from tests.git_tree import git, make_work_tree
from tests.integration.queue_fixture import QueueUnderTest, until


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files = {
        "train.py": "import helper; print(helper.VERSION)\n",
        "helper.py": "VERSION = 'old'\n",
        ".gitignore": "data/\n__pycache__\n",
    }
    root = make_work_tree(tmp_path / "project", files)
    (root / "data").mkdir()
    monkeypatch.chdir(root)
    return root


def submit(*arguments: str) -> str:
    done = run("submit", "--gpus", "0", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def snapshots(queue: QueueUnderTest) -> list[str]:
    folder = queue.home / "snapshots"
    return sorted(os.listdir(folder)) if folder.exists() else []


def test_edits_after_the_submission_do_not_reach_the_job(queue: QueueUnderTest, tree: Path) -> None:
    job = int(submit("--snapshot", "--hold", "--", sys.executable, "train.py"))
    until(lambda: queue.job(job)["code"]["dirty"] is False, "what git says")
    (tree / "helper.py").write_text("VERSION = 'new'\n")
    queue.post("/jobs/release", ids=str(job))
    assert queue.wait(job)["succeeded"] == 1
    assert queue.log_of(job) == "old\n"
    shown = run("show", str(job)).stdout
    assert f"code: commit {git(tree, 'rev-parse', 'HEAD')[:10]}\n" in shown
    assert f"snapshot: {queue.home}/snapshots/" in shown
    assert "has changed" not in shown


def test_without_a_snapshot_the_job_runs_what_is_there_and_says_so(queue: QueueUnderTest, tree: Path) -> None:
    job = int(submit("--hold", "--", sys.executable, "train.py"))
    until(lambda: queue.job(job)["code"]["dirty"] is False, "what git says")
    assert queue.job(job)["code"]["script_changed"] is False
    (tree / "train.py").write_text("print('edited')\n")
    until(lambda: queue.job(job)["code"]["script_changed"], "the change")
    assert "note: the script train.py has changed since it was submitted; the next" in run("show", str(job)).stdout
    queue.post("/jobs/release", ids=str(job))
    queue.wait(job)
    assert queue.log_of(job) == "edited\n"
    until(lambda: queue.job(job)["code"]["changed_attempts"] == [1], "what attempt 1 ran")
    assert "script-changed" in run("history", str(job)).stdout
    assert "attempt 1 ran the changed one" in run("show", str(job)).stdout
    after = int(submit("--", sys.executable, "train.py"))
    until(lambda: queue.job(after)["code"]["dirty"], "what git says")
    assert "with uncommitted changes" in run("show", str(after)).stdout
    queue.wait(after)
    assert queue.job(after)["code"]["changed_attempts"] == []


def test_an_array_shares_one_snapshot_and_results_are_in_the_tree_when_wait_returns(
    queue: QueueUnderTest, tree: Path
) -> None:
    (tree / "part.sh").write_text("mkdir -p runs; echo $1 > runs/$1; echo $1 > data/$1; pwd\n")
    ids = submit("--snapshot", "--array", "0-3", "--", "/bin/sh", "part.sh", "{index}")
    first = int(ids.partition("-")[0])
    assert len(snapshots(queue)) == 1
    assert queue.wait(ids)["succeeded"] == 4
    assert sorted(os.listdir(tree / "runs")) == sorted(os.listdir(tree / "data")) == ["0", "1", "2", "3"]
    folders = {queue.log_of(job) for job in range(first, first + 4)}
    assert folders == {f"{queue.home}/snapshots/{snapshots(queue)[0]}/tree\n"}


def test_a_job_that_waits_for_another_finds_its_results(queue: QueueUnderTest, tree: Path) -> None:
    first = submit("--snapshot", "--", "/bin/sh", "-c", "echo weights > model.pt")
    second = int(submit("--after", first, "--", "cat", "model.pt"))
    assert queue.wait(second)["succeeded"] == 1
    assert queue.log_of(second) == "weights\n"


def test_variables_say_where_the_job_came_from(queue: QueueUnderTest, tree: Path) -> None:
    inner = tree / "inner"
    inner.mkdir()
    (inner / "a").write_text("")
    script = "echo $GPUYARD_SUBMIT_DIR $GPUYARD_COMMIT; [ $PWD = $GPUYARD_SNAPSHOT/inner ] && [ -e a ]"
    job = int(submit("--snapshot", "--cwd", str(inner), "--", "/bin/sh", "-c", script))
    assert queue.wait(job)["succeeded"] == 1
    assert queue.log_of(job) == f"{inner} {git(tree, 'rev-parse', 'HEAD')}\n"


def test_a_job_in_a_snapshot_submits_jobs_that_run_in_the_same_one(queue: QueueUnderTest, tree: Path) -> None:
    inner = f"{' '.join(GPUYARD)} submit --gpus 0 -- {sys.executable} train.py"
    job = int(submit("--snapshot", "--hold", "--", "/bin/sh", "-c", inner))
    (tree / "helper.py").write_text("VERSION = 'new'\n")
    queue.post("/jobs/release", ids=str(job))
    queue.wait(job)
    second = int(queue.log_of(job))
    assert queue.wait(second)["succeeded"] == 1
    assert queue.log_of(second) == "old\n"
    assert queue.job(second)["cwd"] == str(tree)
    assert len(snapshots(queue)) == 1


def test_a_retry_runs_the_same_code_and_is_refused_once_the_snapshot_is_gone(queue: QueueUnderTest, tree: Path) -> None:
    job = int(submit("--snapshot", "--", sys.executable, "train.py"))
    queue.wait(job)
    (tree / "helper.py").write_text("VERSION = 'new'\n")
    assert run("retry", str(job)).returncode == 0
    queue.wait(job)
    assert queue.log_of(job, 2) == "old\n"
    (queue.home / "config.toml").write_text('[keep]\nsnapshots = "0s"\n')
    queue.restart(signal.SIGTERM)
    run("clean")
    assert snapshots(queue) == []
    refused = run("retry", str(job))
    assert refused.returncode != 0
    assert "the snapshot of its code was removed" in refused.stdout + refused.stderr
    assert "snapshot: removed" in run("show", str(job)).stdout
    assert "was removed" in str(queue_error(queue, job))


def queue_error(queue: QueueUnderTest, job: int) -> Exception:
    with pytest.raises(Exception, match="snapshot") as caught:
        queue.post(f"/jobs/{job}/resubmit")
    return caught.value


def test_a_snapshot_goes_with_the_last_job_that_uses_it_and_not_before(queue: QueueUnderTest, tree: Path) -> None:
    gate = queue.gate()
    job = int(submit("--snapshot", "--", "/bin/sh", "-c", f"read word < {gate}; cat helper.py; echo r > result"))
    again = queue.post(f"/jobs/{job}/resubmit", options={"hold": True})["first"]
    queue.until_state(job, "running")
    run("clean", "--older-than", "0s")
    assert len(snapshots(queue)) == 1
    gate.write_text("go\n")
    queue.wait(job)
    run("clean", "--older-than", "0s")
    assert len(snapshots(queue)) == 1, "a held job uses it"
    queue.post("/jobs/cancel", ids=str(again))
    run("clean", "--older-than", "0s")
    assert snapshots(queue) == []
    assert (tree / "result").read_text() == "r\n"


def test_snapshots_are_removed_at_the_end_if_none_are_kept(own_queue: QueueUnderTest, tree: Path) -> None:
    own_queue.home.mkdir(exist_ok=True)
    (own_queue.home / "config.toml").write_text('[submit]\nsnapshot = true\n[keep]\nsnapshots = "0s"\n')
    own_queue.start()
    job = int(submit("--", sys.executable, "train.py"))
    own_queue.wait(job)
    assert own_queue.log_of(job) == "old\n"
    until(lambda: snapshots(own_queue) == [], "the removal of the snapshot")
    other = int(submit("--no-snapshot", "--", sys.executable, "train.py"))
    assert own_queue.job(other)["code"]["snapshot"] is None
    own_queue.wait(other)


def test_results_of_a_job_that_outlived_its_daemon_are_brought_back(queue: QueueUnderTest, tree: Path) -> None:
    gate = queue.gate()
    job = int(submit("--snapshot", "--", "/bin/sh", "-c", f"read word < {gate}; echo r > result"))
    queue.until_state(job, "running")
    queue.restart(signal.SIGKILL)
    gate.write_text("go\n")
    assert queue.wait(job)["succeeded"] == 1
    until((tree / "result").exists, "the result in the tree")


def test_a_refused_submission_leaves_no_snapshot(queue: QueueUnderTest, tree: Path) -> None:
    done = run("submit", "--snapshot", "--vram", "100G", "--", "true")
    assert done.returncode != 0
    assert snapshots(queue) == []


@pytest.mark.parametrize("name", [".new-0123456789abcdef", "0123456789abcdef", ".removed-0123456789abcdef"])
def test_what_a_killed_command_or_daemon_left_is_removed(queue: QueueUnderTest, tree: Path, name: str) -> None:
    """A command that was killed leaves a draft, or a snapshot that no job has; a daemon, a half-removed one."""
    left = queue.home / "snapshots" / name
    (left / "tree").mkdir(parents=True)
    (left / "files").write_bytes(os.fsencode(tree))
    if not name.startswith(".removed"):
        run("clean")
        assert snapshots(queue) == [name], "the command may still be at work"
        hours_ago = time.time() - 2 * 3600
        os.utime(left, (hours_ago, hours_ago))
    run("clean")
    assert snapshots(queue) == []


def test_folders_nested_1500_deep_are_submitted_brought_back_and_removed(queue: QueueUnderTest, tree: Path) -> None:
    left = queue.home / "snapshots" / ".removed-0123456789abcdef"
    left.mkdir(parents=True)
    with deep_folders(left), deep_folders(tree) as bottom:
        script = f"test -e {bottom}/file && echo r > {bottom}/result"
        job = int(submit("--snapshot", "--", "/bin/sh", "-c", script))
        assert queue.wait(job)["succeeded"] == 1
        assert (tree / bottom / "result").read_text() == "r\n"
        done = run("clean", "--older-than", "0s")
        assert done.returncode == 0, done.stderr
        assert snapshots(queue) == []


@pytest.mark.parametrize("status", [0, 3])
def test_a_result_that_cannot_be_brought_back_is_named_kept_and_tried_again(
    queue: QueueUnderTest, tree: Path, tmp_path: Path, status: int
) -> None:
    """The tree has a file where the job has a folder."""
    (tree / "runs").write_text("in the way")
    told = tmp_path / "told"
    script = f"rm -f runs; mkdir runs; echo r > runs/model.pt; echo r > other; exit {status}"
    job = int(submit("--snapshot", "--notify", f"finished,failed=cat > {told}", "--", "/bin/sh", "-c", script))
    queue.wait(job)
    problem = f"{tree}/runs/model.pt: Not a directory"
    assert (tree / "other").exists(), "all else is brought back"
    assert f"its results are not in the tree: {problem}" in queue.job(job)["reason"]
    assert problem in run("show", str(job)).stdout
    assert problem in run("why", str(job)).stdout
    until(told.exists, "the notification")
    until(lambda: problem in told.read_text(), "what it says")
    for _ in range(2):
        until(lambda: problem in str(daemon_notices()), "the notice")
        assert problem in run("summary").stdout
        queue.restart(signal.SIGKILL)
    run("clean", "--older-than", "0s")
    [name] = snapshots(queue)
    assert (queue.home / "snapshots" / name / "tree" / "runs" / "model.pt").exists()
    (tree / "runs").unlink()
    run("clean")
    assert (tree / "runs" / "model.pt").read_text() == "r\n"
    assert not any("brought back" in each for each in daemon_notices())


def daemon_notices() -> list[str]:
    notices: list[str] = json.loads(run("daemon", "status", "--json").stdout)["notices"]
    return notices


def test_a_snapshot_that_is_not_of_this_queue_is_refused(queue: QueueUnderTest, tree: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside" / "0123456789abcdef" / "tree"
    outside.mkdir(parents=True)
    snapshot = {"name": "0123456789abcdef", "folder": str(outside), "root": str(tree), "cwd": str(outside)}
    with pytest.raises(Exception, match="is not a snapshot of this queue"):
        queue.client.request(
            "POST", "/submissions", body={"command": ["true"], "cwd": "/", "code": {"snapshot": snapshot}}
        )


def test_both_options_together_are_refused(queue: QueueUnderTest, tree: Path) -> None:
    done = run("submit", "--snapshot", "--no-snapshot", "--", "true")
    assert done.returncode == 2
    assert "do not go together" in done.stderr
