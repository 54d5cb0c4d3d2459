"""What jobs wrote in a snapshot gets back to the tree, and overwrites nothing that changed there."""

import os
from pathlib import Path

import pytest

from gpuyard.client.code_snapshot import SnapshotLimits, take_snapshot
from gpuyard.engines.common.bring_results import Brought, bring_results, unbrought_results
from tests.fakes.deep_folders import deep_folders


class Snapshot:
    def __init__(self, folder: Path) -> None:
        self.root = folder / "project"
        self.root.mkdir()
        (self.root / "train.py").write_text("one\n")
        (self.root / "results.csv").write_text("head\n")
        (folder / "snapshots").mkdir()
        taken = take_snapshot(str(self.root), str(folder / "snapshots"), SnapshotLimits(1.0, 0.0))
        self.tree = Path(taken["folder"])

    def bring(self) -> Brought:
        return bring_results(str(self.tree.parent), "job-7")


@pytest.fixture(params=["one disk", "two disks"])
def snapshot(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Snapshot:
    """On two disks there are no hard links from one to the other."""
    if request.param == "two disks":

        def refuse(*_: object, **__: object) -> None:
            raise OSError(18, "Invalid cross-device link")

        monkeypatch.setattr(os, "link", refuse)
    return Snapshot(tmp_path)


def test_new_files_appear_in_the_tree_and_code_does_not(snapshot: Snapshot) -> None:
    (snapshot.root / "train.py").write_text("edited by the user\n")
    (snapshot.tree / "runs" / "a").mkdir(parents=True)
    (snapshot.tree / "runs" / "a" / "model.pt").write_text("weights")
    (snapshot.tree / "runs" / "last").symlink_to("a")
    (snapshot.tree / "__pycache__").mkdir()
    (snapshot.tree / "__pycache__" / "train.pyc").write_text("compiled")
    assert snapshot.bring() == Brought(count=2)
    assert (snapshot.root / "runs" / "a" / "model.pt").read_text() == "weights"
    assert os.readlink(snapshot.root / "runs" / "last") == "a"
    assert (snapshot.root / "train.py").read_text() == "edited by the user\n"
    assert not (snapshot.root / "__pycache__").exists()
    assert (snapshot.tree / "runs" / "a" / "model.pt").read_text() == "weights", "a retry needs it"
    assert snapshot.bring() == Brought()


def test_a_changed_file_replaces_the_one_that_is_as_it_was_also_a_second_time(snapshot: Snapshot) -> None:
    for text in ("head\n1\n", "head\n1\n2\n"):
        (snapshot.tree / "results.csv").write_text(text)
        assert snapshot.bring().renamed == ()
        assert (snapshot.root / "results.csv").read_text() == text


def test_a_file_that_changed_or_is_new_in_the_tree_too_is_not_overwritten(snapshot: Snapshot) -> None:
    (snapshot.root / "results.csv").write_text("of the user\n")
    (snapshot.tree / "results.csv").write_text("of the job\n")
    assert snapshot.bring() == Brought(count=1, renamed=("results.csv.job-7",))
    assert (snapshot.root / "results.csv").read_text() == "of the user\n"
    assert (snapshot.root / "results.csv.job-7").read_text() == "of the job\n"
    (snapshot.root / "model.pt").write_text("of the user, longer")
    (snapshot.tree / "model.pt").write_text("of the job")
    assert snapshot.bring().renamed == ("model.pt.job-7",)
    assert (snapshot.root / "model.pt").read_text() == "of the user, longer"


def test_nothing_is_written_through_a_link_of_the_tree(snapshot: Snapshot, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (snapshot.root / "runs").symlink_to(tmp_path / "elsewhere")
    (snapshot.tree / "runs").mkdir()
    (snapshot.tree / "runs" / "model.pt").write_text("weights")
    assert "runs/model.pt" in (snapshot.bring().problem or "")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    (snapshot.root / "runs").unlink()
    assert snapshot.bring() == Brought(count=1)


def test_results_stay_if_the_tree_is_gone(snapshot: Snapshot) -> None:
    snapshot.root.rename(snapshot.root.with_name("moved"))
    assert snapshot.bring() == Brought()
    (snapshot.tree / "model.pt").write_text("weights")
    assert "does not exist" in (snapshot.bring().problem or "")
    assert (snapshot.tree / "model.pt").exists()


def test_what_is_in_the_way_is_named_nothing_is_left_behind_and_all_else_is_brought(snapshot: Snapshot) -> None:
    (snapshot.root / "runs").write_text("a file where the job has a folder")
    for folder in ("model.pt", "model.pt.job-7"):
        (snapshot.root / folder).mkdir()
    (snapshot.tree / "runs").mkdir()
    (snapshot.tree / "runs" / "a").write_text("result")
    (snapshot.tree / "model.pt").write_text("weights")
    (snapshot.tree / "other").write_text("result")
    before = {path.name for path in snapshot.root.iterdir()}
    brought = snapshot.bring()
    assert brought.count == 1
    assert brought.renamed == ()
    assert brought.problem is not None
    assert brought.problem.startswith(f"{snapshot.root}/")
    assert brought.problem.endswith(" (and 1 more)")
    assert {path.name for path in snapshot.root.iterdir()} == {*before, "other"}
    assert unbrought_results(str(snapshot.tree.parent)) == ("job-7", brought.problem)
    (snapshot.root / "runs").unlink()
    (snapshot.root / "model.pt").rmdir()
    assert snapshot.bring() == Brought(count=2)
    assert unbrought_results(str(snapshot.tree.parent)) is None


def test_results_in_nested_folders_are_brought_back(snapshot: Snapshot) -> None:
    with deep_folders(snapshot.tree) as bottom, deep_folders(snapshot.root, depth=1):
        assert snapshot.bring().problem is None
        assert (snapshot.root / bottom / "file").exists()


def test_a_list_that_was_lost_in_a_crash_brings_nothing_twice(snapshot: Snapshot) -> None:
    (snapshot.tree / "model.pt").write_text("weights")
    snapshot.bring()
    (snapshot.tree.parent / "brought").unlink()
    assert snapshot.bring().renamed == ()
    assert sorted(path.name for path in snapshot.root.iterdir()) == ["model.pt", "results.csv", "train.py"]
