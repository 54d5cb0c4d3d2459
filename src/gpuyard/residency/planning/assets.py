"""The basic types of residency: assets, budgets, stages of copies, steps of a plan, causes of stalls. Pure."""

import enum
from collections.abc import Callable

import msgspec

WORKING_PART = 16  # 1/16 of VRAM is reserved for the renderer until its actual use is measured


class Kind(enum.StrEnum):
    SCENE = "scene"
    ACTOR = "actor"


class Asset(msgspec.Struct, frozen=True, kw_only=True):
    """A scene, or an actor's whole sequence. `nbytes` may be an estimate until the asset was read once.

    The key consists of kind and path, because one file may be used as both kinds.
    """

    key: str
    kind: Kind
    nbytes: int
    frame_nbytes: int = 0  # size of an actor's largest frame

    @property
    def path(self) -> str:
        return parts_of(self.key)[1]

    @property
    def stream_frames(self) -> int:
        """Number of frames that a stream buffers: one in use and one in transfer."""
        return 1 if self.nbytes <= self.frame_nbytes else 2

    @property
    def stream_nbytes(self) -> int:
        """Bytes on the device for a stream."""
        return self.stream_frames * self.frame_nbytes

    def stream_ram(self, rounded: Callable[[int], int]) -> int:
        """Bytes in RAM for a stream from disk."""
        return self.stream_frames * rounded(self.frame_nbytes)


class Budgets(msgspec.Struct, frozen=True, kw_only=True):
    """Budgets in bytes. `working` is VRAM reserved for the renderer."""

    vram: int
    ram: int
    scene_slots: int = 5
    working: int = 0

    @property
    def vram_for_assets(self) -> int:
        return max(0, self.vram - self.working)


class Stage(enum.Enum):
    """The stage of a copy in one tier. A copy takes memory in all three stages."""

    COMING = "coming"
    THERE = "there"
    LEAVING = "leaving"


class Read(msgspec.Struct, frozen=True):
    """Read from disk to RAM."""

    key: str


class Promote(msgspec.Struct, frozen=True):
    """Copy from RAM to VRAM; the copy in RAM stays."""

    key: str


class Demote(msgspec.Struct, frozen=True):
    """Copy from VRAM to RAM, and drop the copy in VRAM."""

    key: str


class DropVram(msgspec.Struct, frozen=True):
    key: str


class DropRam(msgspec.Struct, frozen=True):
    key: str


Step = Read | Promote | Demote | DropVram | DropRam


class StallCause(enum.StrEnum):
    """What a requested asset waits for."""

    DISK = "disk"
    UPLOAD = "upload"
    SLOT = "slot"
    VRAM = "vram"
    RAM = "ram"


def key_of(kind: Kind, path: str) -> str:
    return f"{kind}:{path}"


def path_of(key: str | None) -> str | None:
    return None if key is None else parts_of(key)[1]


def parts_of(key: str) -> tuple[Kind, str]:
    kind, _, path = key.partition(":")
    return Kind(kind), path
