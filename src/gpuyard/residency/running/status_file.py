"""How a run stands at a moment, as `status.json` tells it. Sizes in bytes, times in seconds."""

import msgspec


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`doing` is idle, waiting (for `waits_for`: disk, upload, slot, vram or ram), rendering or finished."""

    worker: int
    doing: str
    scene: str | None
    actor: str | None
    label: str | None
    labels_done: int
    waits_for: str | None


class TierStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`assets` is what the copies here take; `allocator` what the device's allocator says, `None` for RAM."""

    budget: int
    assets: int
    peak_assets: int
    allocator: int | None = None
    peak_allocator: int | None = None


class MovedStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What was moved so far."""

    read_from_disk: int
    uploaded: int
    streamed: int
    downloaded: int


class CountsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Of assets asked for: found in VRAM, found in RAM, or read from disk; and what became of memory that was short."""

    vram_hits: int
    ram_hits: int
    misses: int
    streams: int
    out_of_memory: int


class RenderStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`left_s` is the time to completion, `None` before it can be told; `stalls_s` is by cause, over all workers."""

    state: str  # running, finished, interrupted
    started_at: str
    now: str
    elapsed_s: float
    left_s: float | None
    labels: int
    rendered: int
    already: int
    skipped: int
    vram: TierStatus
    ram: TierStatus
    scene_slots: int
    scenes: tuple[str, ...]  # in VRAM
    actors: tuple[str, ...]  # in VRAM
    scenes_in_ram: tuple[str, ...]
    actors_in_ram: tuple[str, ...]
    moved: MovedStatus
    counts: CountsStatus
    stalls_s: dict[str, float]
    workers: tuple[WorkerStatus, ...]
    device: str


class Skip(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A label that was not rendered, as a line of `skipped.jsonl`.

    `kind` is out-of-memory, too-large, asset, renderer or output; `traceback` is the renderer's; sizes are in bytes.
    """

    label: str
    kind: str
    reason: str
    traceback: str | None = None
    scene: str | None = None
    actor: str | None = None
    sizes: dict[str, int] = {}
    state: dict[str, int] = {}


class RenderReport(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a run."""

    status: RenderStatus
    skipped: tuple[Skip, ...]
