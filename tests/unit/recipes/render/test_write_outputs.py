"""Outputs are complete or absent after any crash, each root has one run at a time, and a slow disk delays no label."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.recipes.render import write_outputs
from gpuyard.recipes.render.planning.assets_and_units import Label, Unit
from gpuyard.recipes.render.status_file import Skip
from gpuyard.recipes.render.write_outputs import Outputs, OutputWriters, SkipsUnwritten, check_outputs
from tests.residency_runs import DEADLINE_S, AssetFiles, check_every_label, play, write_checksum

A, B = Label(name="a", value={}), Label(name="b", value={})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "deep/out"


def put(outputs: Outputs, label: Label, text: str = "done") -> None:
    folder = outputs.open(label)
    (folder / "sub").mkdir()
    (folder / "sub/image").write_text(text)
    outputs.commit(label, folder)


def skip(name: str = "a", reason: str = "too large") -> Skip:
    return Skip(label=name, kind="asset", reason=reason)


def skipped_in(root: Path) -> list[str]:
    return [json.loads(line)["label"] for line in (root / "skipped.jsonl").read_text().splitlines()]


def names_in(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def fail(monkeypatch: pytest.MonkeyPatch, home: Any, name: str, number: int) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(home, name, refuse)


def run_python(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stderr


# Complete or absent


def test_an_output_gets_its_name_only_when_it_is_committed(root: Path) -> None:
    with Outputs(root, resume=False) as outputs:
        folder = outputs.open(A)
        assert list(folder.iterdir()) == []
        (folder / "image").write_text("half")
        assert not (root / "a").exists()
        (folder / "image").write_text("whole")
        (folder / "nowhere").symlink_to("/no/such/file")
        os.mkfifo(folder / "pipe")  # which does not block
        outputs.commit(A, folder)
        assert (root / "a/image").read_text() == "whole"
        assert (root / "a/pipe").is_fifo()
        assert not folder.exists()
        outputs.open(B)
    assert names_in(root) == {"a", "skipped.jsonl", ".lock"}


def test_complete_outputs_are_kept_when_a_run_resumes(root: Path) -> None:
    with Outputs(root, resume=False) as outputs:
        put(outputs, A, "first")
    with Outputs(root, resume=True) as outputs:
        assert [outputs.is_complete(label) for label in (A, B)] == [True, False]
        put(outputs, B)
    assert (root / "a/sub/image").read_text() == "first"
    assert names_in(root) >= {"a", "b"}


def test_a_refused_run_keeps_an_existing_output_and_the_skips_of_the_last_run(root: Path) -> None:
    with Outputs(root, resume=False) as outputs:
        put(outputs, A, "first")
        outputs.skip(skip("b"))
    with pytest.raises(UserError, match="a already exists") as caught:
        check_outputs(root, [Unit(scene="s", labels=(B, A))], resume=False)
    assert "--resume" in str(caught.value.hint)
    with pytest.raises(UserError, match="a already exists"), Outputs(root, resume=False) as outputs:
        outputs.is_complete(A)
    assert (root / "a/sub/image").read_text() == "first"
    assert skipped_in(root) == ["b"]


@pytest.mark.parametrize("resume", [False, True])
def test_a_file_in_the_place_of_an_output_is_refused(root: Path, resume: bool) -> None:
    root.mkdir(parents=True)
    (root / "a").write_text("precious")
    with pytest.raises(UserError, match="a is a file"):
        check_outputs(root, [Unit(scene="s", labels=(A,))], resume=resume)
    assert (root / "a").read_text() == "precious"


@pytest.mark.parametrize("name", ["", ".", "..", ".lock", "a/b", "/etc", "skipped.jsonl"])
def test_a_name_that_leads_out_of_the_root_is_refused(root: Path, name: str) -> None:
    with pytest.raises(UserError, match="cannot be the name"):
        check_outputs(root, [Unit(scene="s", labels=(Label(name=name, value={}),))], resume=True)


KILLED = """
import os, signal, sys; from pathlib import Path
from gpuyard.recipes.render.write_outputs import Outputs
from gpuyard.recipes.render.planning.assets_and_units import Label
outputs = Outputs(Path(sys.argv[1]), resume=False)
for name in 'ab':
    label = Label(name=name, value={}); folder = outputs.open(label)
    (folder / 'image').write_text(name)
    if name == 'a': outputs.commit(label, folder)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_temporary_files_of_a_killed_run_are_removed(root: Path) -> None:
    run_python(KILLED, str(root))
    assert len(list((root / ".partial").iterdir())) == 1
    with Outputs(root, resume=True) as outputs:
        assert [outputs.is_complete(label) for label in (A, B)] == [True, False]
        assert list((root / ".partial").iterdir()) == []


def test_two_runs_in_one_root_are_refused_until_the_first_is_over(root: Path) -> None:
    with Outputs(root, resume=False) as first:
        folder = first.open(A)
        with pytest.raises(EnvironmentFault, match="another run writes its outputs to"):
            Outputs(root, resume=True)
        first.commit(A, folder)
    with Outputs(root, resume=True) as second:
        assert second.is_complete(A)


# Disks and roots that fail


def test_an_unusable_root_is_reported(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.parent.mkdir()
    root.touch()
    for path in (root, root / "below"):
        with pytest.raises(UserError, match="there is a file of that name"):
            Outputs(path, resume=False)
    fail(monkeypatch, Path, "mkdir", errno.EROFS)
    with pytest.raises(EnvironmentFault, match="out cannot be used for outputs: Read-only file system"):
        Outputs(tmp_path / "out", resume=False)


@pytest.mark.parametrize(("home", "name"), [(os, "fsync"), (Path, "rename")])
def test_a_full_disk_fails_the_label_and_leaves_no_files_of_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, home: Any, name: str
) -> None:
    with Outputs(root, resume=False) as outputs:
        folder = outputs.open(A)
        (folder / "image").write_text("much")
        with monkeypatch.context() as patched:
            fail(patched, home, name, errno.ENOSPC)
            with pytest.raises(EnvironmentFault, match="a cannot be written: No space left on device"):
                outputs.commit(A, folder)
        assert not folder.exists()
        put(outputs, B)
    assert names_in(root) == {"b", "skipped.jsonl", ".lock"}


def test_an_output_that_cannot_be_created_or_was_created_meanwhile_is_reported(root: Path) -> None:
    with Outputs(root, resume=False) as outputs:
        folder = outputs.open(A)
        (root / "a").mkdir()
        (root / "a/image").write_text("another's")
        with pytest.raises(EnvironmentFault, match="a cannot be written"):
            outputs.commit(A, folder)
        shutil.rmtree(root / ".partial")
        with pytest.raises(EnvironmentFault, match="b cannot be created"):
            outputs.open(B)
    assert (root / "a/image").read_text() == "another's"


# Skipped labels


def test_a_skip_is_written_at_once_and_each_run_starts_with_no_skips(root: Path) -> None:
    with Outputs(root, resume=False) as outputs:
        put(outputs, A)
        outputs.skip(skip("b", "line\nbreak"))
        outputs.skip(skip("c", os.fsdecode(b"\xff.ply")))
        assert skipped_in(root) == ["b", "c"]
    assert json.loads((root / "skipped.jsonl").read_text().splitlines()[1])["reason"] == "\udcff.ply"
    check_outputs(root, [Unit(scene="s", labels=(A,))], resume=True)
    assert len(skipped_in(root)) == 2
    with Outputs(root, resume=True) as outputs:
        assert outputs.is_complete(A), "nothing is left to render"
    assert skipped_in(root) == []


def test_the_error_about_missing_lines_has_all_skips(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = Outputs(root, resume=False)
    outputs.skip(skip("a"))
    fail(monkeypatch, os, "write", errno.ENOSPC)
    outputs.skip(skip("b"))
    with pytest.raises(SkipsUnwritten, match=r"skipped\.jsonl cannot be written: No space left on device") as caught:
        outputs.close()
    assert caught.value.skipped == (skip("a"), skip("b"))
    assert skipped_in(root) == ["a"]


def test_the_error_that_ended_a_run_goes_before_missing_lines(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, os, "write", errno.ENOSPC)

    def run() -> None:
        with Outputs(root, resume=False) as outputs:
            outputs.skip(skip("a"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()


FULL = """
import resource, signal, sys; from pathlib import Path
from gpuyard.recipes.render.write_outputs import Outputs
from gpuyard.recipes.render.status_file import Skip
outputs = Outputs(Path(sys.argv[1]), resume=False)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for number in range(4):
    limit = 100 if number < 3 or sys.argv[2] == 'stays' else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    outputs.skip(Skip(label=str(number), kind='asset', reason='x' * 30))
    lines = Path(sys.argv[1], 'skipped.jsonl').read_bytes()
    assert not lines or lines.endswith(b'\\n'), lines
outputs.close()
"""


@pytest.mark.parametrize(("disk", "written"), [("stays", ["0"]), ("is freed", ["0", "1", "2", "3"])])
@pytest.mark.usefixtures("unmeasured")
def test_lines_that_do_not_fit_on_the_disk_are_written_later_and_whole(
    root: Path, disk: str, written: list[str]
) -> None:
    errors = run_python(FULL, str(root), disk)
    assert skipped_in(root) == written
    assert ("skipped.jsonl cannot be written: File too large" in errors) == (disk == "stays"), errors


# Writers


@pytest.mark.parametrize("failing", [False, True], ids=["slow", "full"])
def test_other_labels_are_rendered_while_an_output_is_slow_to_write_or_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: bool
) -> None:
    asset_files = AssetFiles(tmp_path / "assets", [40], [[30, 30]])
    units = [asset_files.unit(0, 0, labels=2)]
    first, second = (label.name for label in units[0].labels)
    is_second_rendered = threading.Event()
    plain = Outputs.commit

    def commit(outputs: Outputs, label: Label, folder: Path) -> None:
        assert label.name != first or is_second_rendered.wait(DEADLINE_S)
        if failing and label.name == first:
            outputs.discard(folder)
            raise EnvironmentFault("the disk is full")
        plain(outputs, label, folder)

    def render(scene: Any, frames: Any, label: Any, out_dir: Path) -> None:
        write_checksum(scene, frames, label, out_dir)
        if label["name"] == second:
            is_second_rendered.set()

    monkeypatch.setattr(Outputs, "commit", commit)
    played = play(units, tmp_path / "out", vram=1 << 20, ram=1 << 20, workers=1, render=render)

    check_every_label(units, played, asset_files)
    found = {name: (each.kind, each.reason) for name, each in played.skipped.items()}
    assert found == ({first: ("output", "the disk is full")} if failing else {})


def test_a_worker_waits_while_too_many_outputs_are_not_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_outputs, "_MOST_WAITING", 2)
    may_write, written = threading.Event(), threading.Semaphore(0)

    def write() -> None:
        assert may_write.wait(DEADLINE_S)
        written.release()

    with OutputWriters() as writers:
        for _ in range(2):
            writers.write(write)
        third = threading.Thread(target=writers.write, args=(write,))
        third.start()
        third.join(0.05)
        assert third.is_alive()
        may_write.set()
        third.join(DEADLINE_S)
        assert not third.is_alive()
    assert all(written.acquire(blocking=False) for _ in range(3))


def test_an_unexpected_error_of_a_write_ends_the_run() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    writers = OutputWriters()
    with pytest.raises(ZeroDivisionError), writers:
        writers.write(fail)
    with pytest.raises(ZeroDivisionError):
        writers.write(fail)
