"""The status of a run as in `status.json`. Sizes are in bytes, times in seconds."""

import json

import msgspec


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`doing` is idle, waiting (for `waits_for`: disk, upload, slot, vram or ram), rendering or finished."""

    worker: int
    doing: str = "idle"
    scene: str | None = None
    actor: str | None = None
    label: str | None = None
    labels_done: int = 0
    waits_for: str | None = None


class TierStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`assets` is the memory of copies in this tier; `allocator` the device allocator's own figure, None for RAM;
    `left` is what neither of them takes of the budget."""

    budget: int
    left: int
    assets: int
    peak_assets: int
    allocator: int | None = None
    peak_allocator: int | None = None


class AssetReferences(msgspec.Struct, frozen=True, kw_only=True):
    """An asset in VRAM or RAM: the workers whose unit needs it now, and the coming units that will."""

    kind: str
    path: str
    workers: int
    units: int


class MovedStatus(msgspec.Struct, frozen=True, kw_only=True):
    read_from_disk: int
    uploaded: int
    streamed: int
    downloaded: int


class CountsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Requested assets found in VRAM, found in RAM, or read from disk; streams; and times that the device was full."""

    vram_hits: int
    ram_hits: int
    misses: int
    streams: int
    out_of_memory: int


class TransferCounts(msgspec.Struct):
    """The counts of a run: those of MovedStatus and CountsStatus, and the stalls by cause."""

    read_from_disk: int = 0
    uploaded: int = 0
    streamed: int = 0
    downloaded: int = 0
    vram_hits: int = 0
    ram_hits: int = 0
    misses: int = 0
    streams: int = 0
    out_of_memory: int = 0
    peak_vram: int = 0
    peak_ram: int = 0
    stalls_s: dict[str, float] = {}


class RenderStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`left_s` is the estimated time left, None before the first label; `stalls_s` sums all workers by cause."""

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
    references: tuple[AssetReferences, ...]
    moved: MovedStatus
    counts: CountsStatus
    stalls_s: dict[str, float]
    workers: tuple[WorkerStatus, ...]
    device: str


class SkipReason(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`kind` is out-of-memory, too-large, asset, renderer or output; `traceback` is the renderer's; sizes are in
    bytes."""

    kind: str
    reason: str
    traceback: str | None = None
    sizes: dict[str, int] = {}
    state: dict[str, int] = {}


class Skip(SkipReason, frozen=True, kw_only=True, omit_defaults=True):
    label: str
    scene: str | None = None
    actor: str | None = None


class RenderReport(msgspec.Struct, frozen=True, kw_only=True):
    status: RenderStatus
    skipped: tuple[Skip, ...]


def as_json(value: msgspec.Struct, indent: int | None = None) -> bytes:
    try:
        return msgspec.json.format(msgspec.json.encode(value), indent=-1 if indent is None else indent)
    except UnicodeEncodeError:  # it has a file name that is not UTF-8
        return json.dumps(msgspec.to_builtins(value), indent=indent).encode()
