"""Attacks by links in folders for results, to which other users can write."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuyard.engines.session.task_files import append_event, open_log
from gpuyard.errors import EnvironmentFault
from gpuyard.recipes.batch.plan import RECORD, read_record
from gpuyard.recipes.batch.prune_empty_runs import PrunedRun, prune
from gpuyard.recipes.render.planning.assets_and_units import Label
from gpuyard.recipes.render.status_file import StatusFile
from gpuyard.recipes.render.write_outputs import Outputs
from gpuyard.recipes.uninstall import InstalledFiles, remove
from gpuyard.system import folder_tree
from gpuyard.system.private_files import PrivateFileError
from tests.fakes.queue_command import run
from tests.hostile.catalogue import attack
from tests.hostile.users import BEN, act_as
from tests.integration.queue_fixture import QueueUnderTest, until
from tests.unit.recipes import AT, RUN, WHY

PRECIOUS = "precious"


def write(path: str, content: str) -> None:
    Path(path).write_text(content, encoding="utf-8")


class Shared:
    """Output root and prune root of a batch that all users can write to, and a folder of the victim elsewhere."""

    def __init__(self, place: Path) -> None:
        self.output, self.pruned, self.keys = place / "out", place / "pruned", place / "victim" / "keys"
        for folder in (self.output, self.pruned):
            folder.mkdir()
            folder.chmod(0o777)
        self.keys.mkdir(parents=True)
        (self.keys / "log.txt").write_text(PRECIOUS)
        self._modes = ((self.keys.parent, 0o755), (self.keys, 0o751), (self.keys / "log.txt", 0o641))
        for path, mode in self._modes:
            path.chmod(mode)
        self.run = self.output / RUN
        (self.run / "deep").mkdir(parents=True)
        (self.run / "deep" / "log.txt").write_text("no frame")

    @property
    def leftover(self) -> Path:
        return self.pruned / ".leftover"

    def prune(self) -> PrunedRun:
        return prune(self.run, self.pruned, self.output / "pruned.jsonl", why=WHY, at=AT)

    def check_victim(self) -> None:
        assert [stat.S_IMODE(path.stat().st_mode) for path, _ in self._modes] == [mode for _, mode in self._modes]
        assert [path.name for path in self.keys.iterdir()] == ["log.txt"]
        assert (self.keys / "log.txt").read_text() == PRECIOUS


@pytest.fixture
def shared(place: Path) -> Shared:
    return Shared(place)


def swap(path: Path, other: Path) -> None:
    """As any user can in a folder that all can write to: put a link in place of a folder."""
    path.replace(path.with_name(f"{path.name}.aside"))
    path.symlink_to(other)


@attack("swap a folder in a leftover for a link while it is removed", now="refused")
def test_swap_while_a_leftover_is_removed(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    (shared.leftover / "deep").mkdir(parents=True)
    open_folder = folder_tree.open_folder

    def swap_first(name: str, *arguments: Any, **options: Any) -> int:
        if name == "deep":
            swap(shared.leftover / "deep", shared.keys)
        return open_folder(name, *arguments, **options)

    monkeypatch.setattr(folder_tree, "open_folder", swap_first)
    [problem] = folder_tree.remove_tree(shared.leftover)
    assert problem.filename == str(shared.leftover / "deep")
    shared.check_victim()


@attack("make the record of pruned runs a link", now="refused")
def test_record_behind_a_link(shared: Shared) -> None:
    act_as(BEN, os.symlink, str(shared.keys / "log.txt"), str(shared.output / "pruned.jsonl"))
    assert "it is a symbolic link" in (shared.prune().left or "")
    assert shared.run.exists()
    shared.check_victim()


@attack("write a record of a run that was never moved", now="refused")
def test_record_of_another_user(shared: Shared, place: Path) -> None:
    act_as(BEN, os.mkdir, str(place / "fake"))
    act_as(BEN, os.mkdir, str(place / "fake/deep"))
    act_as(BEN, write, str(place / "fake/deep/log.txt"), "no frame")
    line = {"run": RUN, "to": str(place / "fake"), "why": WHY, "at": AT}
    act_as(BEN, write, str(shared.output / "pruned.jsonl"), json.dumps(line) + "\n")
    assert "it belongs to another user" in (shared.prune().left or "")
    assert (shared.run / "deep" / "log.txt").exists()


@attack("write the record of a batch into an output root", now="refused")
def test_batch_record_of_another_user(shared: Shared) -> None:
    plan = {"name": "b", "command": ["true"], "root": str(shared.keys), "count": 1, "seed": 0}
    act_as(BEN, write, str(shared.output / RECORD), json.dumps({"plan": plan, "parts": []}))
    with pytest.raises(EnvironmentFault, match="it belongs to another user"):
        read_record(shared.output)


@attack("make `skipped.jsonl` of a render run a link", now="refused")
def test_skipped_labels_behind_a_link(shared: Shared) -> None:
    act_as(BEN, os.symlink, str(shared.keys / "log.txt"), str(shared.output / "skipped.jsonl"))
    outputs = Outputs(shared.output, resume=False)
    with pytest.raises(EnvironmentFault):
        outputs.open(Label(name="a", value=None))
    outputs.close(was_run=False)
    shared.check_victim()


@attack("make `.lock` of a render run a link to a new file", now="refused")
def test_lock_of_a_render_run_behind_a_link(shared: Shared) -> None:
    act_as(BEN, os.symlink, str(shared.keys / "new"), str(shared.output / ".lock"))
    with pytest.raises(EnvironmentFault, match="cannot be used for outputs"):
        Outputs(shared.output, resume=False)
    shared.check_victim()


@attack("make `.partial` of a render run a link", now="refused")
def test_partial_outputs_behind_a_link(shared: Shared) -> None:
    act_as(BEN, os.symlink, str(shared.keys), str(shared.output / ".partial"))
    with pytest.raises(EnvironmentFault, match="cannot be used for outputs"):
        Outputs(shared.output, resume=False)
    shared.check_victim()


class _Status(msgspec.Struct):
    elapsed_s: float = 100.0


@attack("plant a link at the draft of `status.json`", now="ignored")
def test_status_behind_a_link(shared: Shared) -> None:
    act_as(BEN, os.symlink, str(shared.keys / "log.txt"), str(shared.output / f".status.json.{os.getpid()}"))
    act_as(BEN, os.symlink, str(shared.keys / "log.txt"), str(shared.output / "status.json"))
    StatusFile(shared.output / "status.json").write(_Status())  # type: ignore[arg-type]
    assert not (shared.output / "status.json").is_symlink()
    shared.check_victim()


@attack("make the log of a workspace's task a link", now="refused")
def test_task_log_behind_a_link(shared: Shared) -> None:
    act_as(BEN, os.symlink, str(shared.keys / "log.txt"), str(shared.output / "a.log"))
    with pytest.raises(PrivateFileError, match="it is a symbolic link"):
        append_event(str(shared.output / "a.log"), "started")
    act_as(BEN, os.mkdir, str(shared.output / "train_logs"), 0o777)
    with pytest.raises(PrivateFileError, match="belongs to another user"):
        open_log(str(shared.output / "train_logs/a.log"), None, "")
    shared.check_victim()


@attack("put links and folders into a folder that `gpuyard uninstall` removes", now="ignored")
def test_uninstall_beside_links(shared: Shared, place: Path) -> None:
    state = place / "state"
    state.mkdir()
    state.chmod(0o777)
    act_as(BEN, os.mkdir, str(state / "theirs"))
    (state / "link").symlink_to(shared.keys)
    kept = remove([InstalledFiles(what="", folder=str(state), names=("theirs", "link"), shown="")])
    assert [each.path for each in kept] == [str(state / "theirs")]
    assert os.listdir(state) == ["theirs"]
    shared.check_victim()


@attack(
    "plant a link at the file that `submit --output` names, or at a folder above it",
    now="refused",
)
def test_output_through_a_link(queue: QueueUnderTest, shared: Shared) -> None:
    theirs, keys = shared.output / "theirs", shared.keys
    act_as(BEN, os.symlink, str(keys / "log.txt"), str(shared.output / "file"))
    act_as(BEN, os.symlink, str(keys), str(shared.output / "folder"))
    os.link(keys / "log.txt", shared.output / "hard")  # as Ben where the kernel lets him
    act_as(BEN, write, str(theirs), "")
    theirs.chmod(0o666)
    for name in ("file", "folder/log.txt", "folder/new/log.txt", "hard", "theirs"):
        job = queue.submit("echo", "spoiled", gpus=0, output=str(shared.output / name))
        queue.wait(job)
        assert queue.job(job)["reason"].startswith(
            f"the output {shared.output / name} cannot be written: it, or a link"
        )
    assert (keys / "log.txt").read_text() == PRECIOUS
    assert os.listdir(keys) == ["log.txt"]
    assert theirs.read_text() == ""


@attack(
    "plant links at the files that `report --html`, `export --force`, `simulate --save` and `--picture`, `estimates "
    "export` and `watch --log` name, or at a folder above them",
    now="refused",
)
@pytest.mark.parametrize(
    "command",
    [
        ("report", "--html"),
        ("export", "--force", "slurm"),
        ("simulate", "trace.csv", "--save"),
        ("simulate", "trace.csv", "--picture"),
        ("estimates", "export"),
        ("watch", "--count", "1", "--log"),
    ],
    ids=" ".join,
)
def test_named_file_through_a_link(
    queue: QueueUnderTest, shared: Shared, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    queue.submit("true", hold=True)
    monkeypatch.chdir(shared.keys.parent)
    Path("trace.csv").write_text("at_s,program,duration_s,peak_mb,load_percent\n0,python train.py,600,6000,30\n")
    ending = {"--picture": ".svg", "--log": ".csv"}.get(command[-1], ".txt")
    act_as(BEN, os.symlink, str(shared.keys / "log.txt"), str(shared.output / f"file{ending}"))
    act_as(BEN, os.symlink, str(shared.keys), str(shared.output / "folder"))
    os.link(shared.keys / "log.txt", shared.output / f"hard{ending}")
    act_as(BEN, write, str(shared.output / f"theirs{ending}"), "")
    (shared.output / f"theirs{ending}").chmod(0o666)
    for name in ("file", "folder/new", "hard", "theirs"):
        done = run(*command, str(shared.output / f"{name}{ending}"))
        assert done.returncode != 0, done.stdout
        assert str(shared.output / f"{name}{ending}") in done.stderr
    shared.check_victim()
    assert (shared.output / f"theirs{ending}").read_text() == ""
    own = shared.output / f"own{ending}"
    own.write_text("x" * 10_000_000 if command[-1] != "--log" else "")
    done = run(*command, str(own))
    assert done.returncode == 0, done.stderr
    assert 0 < own.stat().st_size < 10_000_000


def replace_by_pipe(path: str) -> None:
    os.unlink(path)
    os.mkfifo(path)


@attack(
    "replace the file of `submit --output` by a pipe while the job runs, so that readers wait for ever",
    now="harmless",
)
def test_output_replaced_by_a_pipe(queue: QueueUnderTest, shared: Shared) -> None:
    out, gate = shared.output / "out", queue.gate()
    job = queue.shell(f"echo begun; read word < {gate}; exit 1", gpus=0, output=str(out))
    until(lambda: out.exists() and out.read_text() == "begun\n", "its output")
    act_as(BEN, replace_by_pipe, str(out))
    gate.write_text("go\n")
    queue.wait(job)
    assert (queue.job(job)["outcome"], queue.get(f"/jobs/{job}/log")["text"]) == ("failed", "")
    assert run("logs", str(job)).stdout == ""
