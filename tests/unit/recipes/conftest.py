import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.recipes import MOVE_METHODS, MoveMethod, Roots, another_file_system, rename_within_folders_only


@pytest.fixture(params=MOVE_METHODS)
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MoveMethod:
    method: MoveMethod = request.param
    if method == "copied" and another_file_system(tmp_path) is None:
        method = "mounted twice"  # covers copying on a machine with one file system
    if method == "mounted twice":
        monkeypatch.setattr(os, "rename", rename_within_folders_only)
    return method


@pytest.fixture
def roots(method: MoveMethod, tmp_path: Path) -> Iterator[Roots]:
    place = another_file_system(tmp_path) if method == "copied" else tmp_path
    with tempfile.TemporaryDirectory(dir=place, prefix="gpuyard-test-") as folder:
        roots = Roots(output=tmp_path / "out", pruned=Path(folder, "pruned"))
        roots.fill()
        yield roots
