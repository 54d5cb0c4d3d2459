from pathlib import Path

import pytest

from tests.unit.recipes import Roots


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    roots = Roots(output=tmp_path / "out", pruned=tmp_path / "pruned")
    roots.fill()
    return roots
