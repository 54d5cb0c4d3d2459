"""An example status of a render run."""

from typing import Any

from msgspec.structs import replace

from gpuyard.recipes.render.status_file import (
    AssetReferences,
    CountsStatus,
    MovedStatus,
    RenderStatus,
    TierStatus,
    WorkerStatus,
)

_GB = 1 << 30

STATUS = RenderStatus(
    state="running",
    started_at="2026-01-02T03:04:05.000Z",
    now="2026-01-02T03:16:10.000Z",
    elapsed_s=725.0,
    left_s=1320.0,
    labels=2000,
    rendered=1200,
    already=100,
    skipped=3,
    vram=TierStatus(
        budget=44 * _GB,
        left=11 * _GB,
        assets=30 * _GB,
        peak_assets=40 * _GB,
        allocator=33 * _GB,
        peak_allocator=43 * _GB,
    ),
    ram=TierStatus(budget=90 * _GB, left=45 * _GB, assets=45 * _GB, peak_assets=89 * _GB),
    scene_slots=5,
    scenes=("/a.ply", "/b.ply"),
    actors=("/walk",),
    scenes_in_ram=("/c.ply",),
    actors_in_ram=(),
    references=(
        AssetReferences(kind="scene", path="/a.ply", workers=2, units=3),
        AssetReferences(kind="scene", path="/c.ply", workers=0, units=9),
        AssetReferences(kind="actor", path="/walk/", workers=1, units=0),
    ),
    moved=MovedStatus(read_from_disk=60 * _GB, uploaded=80 * _GB, streamed=0, downloaded=_GB),
    counts=CountsStatus(vram_hits=90, ram_hits=6, misses=4, streams=0, out_of_memory=0),
    stalls_s={},
    workers=(),
    device="cuda:0",
)


def status(**changes: Any) -> RenderStatus:
    return replace(STATUS, **changes)


def worker(doing: str, waits_for: str | None = None) -> WorkerStatus:
    return WorkerStatus(
        worker=0, doing=doing, scene="/a.ply", actor=None, label=None, labels_done=7, waits_for=waits_for
    )
