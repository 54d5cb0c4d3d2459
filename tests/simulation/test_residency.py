"""Whole runs with real threads, over random manifests and budgets: every label ends once, and no budget is exceeded."""

import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.residency_runs import PAGE, AssetFiles, check_every_label, check_within_budgets, play
from tests.scale import seeds

SCENES = (20, 40, 60, 100, 160, 250)  # splats of 248 bytes
ACTORS = ((300,), (200, 250), (20, 900, 30), (150,) * 6, (400,) * 8, (1500, 10))
LARGEST = 150 * 1024
EXAMPLES = seeds(30, full=30)


@pytest.fixture(scope="module")
def asset_files(tmp_path_factory: pytest.TempPathFactory) -> AssetFiles:
    return AssetFiles(tmp_path_factory.mktemp("assets"), SCENES, ACTORS)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    vram: int
    ram: int
    scene_slots: int
    workers: int
    order: str


some_work = st.lists(
    st.tuples(
        st.none() | st.integers(0, len(SCENES) - 1), st.none() | st.integers(0, len(ACTORS) - 1), st.integers(1, 3)
    ),
    min_size=1,
    max_size=25,
)
limits_to_try = st.builds(
    Limits,
    vram=st.integers(5_000, 4 * LARGEST),
    ram=st.integers(2 * PAGE, 4 * LARGEST),
    scene_slots=st.integers(1, 5),
    workers=st.integers(1, 6),
    order=st.sampled_from(["chosen", "manifest"]),
)


@settings(max_examples=EXAMPLES)
@given(some_work, limits_to_try)
def test_every_label_ends_once_and_no_budget_is_exceeded(
    asset_files: AssetFiles, work: list[tuple[int | None, int | None, int]], limits: Limits
) -> None:
    units = [asset_files.unit(*each) for each in work]
    with tempfile.TemporaryDirectory() as folder:
        played = play(units, Path(folder), **msgspec.structs.asdict(limits))
    check_every_label(units, played, asset_files)
    check_within_budgets(played, limits.vram, limits.ram)
    assert played.status.state == "finished"
    assert {skip.kind for skip in played.skipped.values()} <= {"too-large"}
