import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.recipes import WAYS, Roots, Way, another_file_system, rename_within_folders_only


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Way:
    way: Way = request.param
    if way == "copied" and another_file_system(tmp_path) is None:
        way = "mounted twice"  # a machine with one file system copies, too
    if way == "mounted twice":
        monkeypatch.setattr(os, "rename", rename_within_folders_only)
    return way


@pytest.fixture
def roots(way: Way, tmp_path: Path) -> Iterator[Roots]:
    place = another_file_system(tmp_path) if way == "copied" else tmp_path
    with tempfile.TemporaryDirectory(dir=place, prefix="gpuyard-test-") as folder:
        roots = Roots(output=tmp_path / "out", pruned=Path(folder, "pruned"))
        roots.fill()
        yield roots
