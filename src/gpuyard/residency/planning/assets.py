"""The words of residency: assets, where they are, and what is done about it. Pure."""

import enum
from collections.abc import Callable

import msgspec

WORKING_PART = 16  # that part of VRAM is left to the renderer until it is seen what it needs


class Kind(enum.StrEnum):
    SCENE = "scene"
    ACTOR = "actor"


class Asset(msgspec.Struct, frozen=True, kw_only=True):
    """A scene, or an actor's whole sequence. `nbytes` is measured, or estimated until it was read once.

    Its key is its kind and its path: one file may be both.
    """

    key: str
    kind: Kind
    nbytes: int
    frame_nbytes: int = 0  # an actor's largest frame

    @property
    def path(self) -> str:
        return parts_of(self.key)[1]

    @property
    def stream_frames(self) -> int:
        """How many frames a stream of it has in hand: one in use and one on its way."""
        return 1 if self.nbytes <= self.frame_nbytes else 2

    @property
    def stream_nbytes(self) -> int:
        """What streaming it takes on the device."""
        return self.stream_frames * self.frame_nbytes

    def stream_ram(self, rounded: Callable[[int], int]) -> int:
        """What streaming it from disk takes in RAM."""
        return self.stream_frames * rounded(self.frame_nbytes)


class Budgets(msgspec.Struct, frozen=True, kw_only=True):
    """In bytes. `working` is what the renderer needs for itself on the device."""

    vram: int
    ram: int
    scene_slots: int = 5
    working: int = 0

    @property
    def vram_for_assets(self) -> int:
        return max(0, self.vram - self.working)


class Stage(enum.Enum):
    """How a copy in one tier stands. What comes and what leaves takes its room already and still."""

    COMING = "coming"
    THERE = "there"
    LEAVING = "leaving"


class Read(msgspec.Struct, frozen=True):
    """Disk to RAM."""

    key: str


class Promote(msgspec.Struct, frozen=True):
    """RAM to VRAM; the copy in RAM stays."""

    key: str


class Demote(msgspec.Struct, frozen=True):
    """VRAM to RAM, and the copy in VRAM goes."""

    key: str


class DropVram(msgspec.Struct, frozen=True):
    key: str


class DropRam(msgspec.Struct, frozen=True):
    key: str


Step = Read | Promote | Demote | DropVram | DropRam


class StallCause(enum.StrEnum):
    """Why an asset that is needed now is not there yet: the causes of stalls."""

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
