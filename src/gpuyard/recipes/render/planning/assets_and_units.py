"""Assets, the budgets and limits of their memory, and the steps that move them; render units, and where each asset is
needed next. Pure. Places count the uses of assets: a unit's scene comes just before its actor, as for the worker."""

import enum
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

# Workers share one interpreter: on an H200, two render 473 pictures per second where four render 308 (ADR 87).
DEFAULT_WORKERS = 2
WORKING_PART = 16  # 1/16 of VRAM is reserved for the renderer until its actual use is measured


class Kind(enum.StrEnum):
    SCENE = "scene"
    ACTOR = "actor"


class Asset(msgspec.Struct, frozen=True, kw_only=True):
    """A scene, or an actor's whole sequence. `nbytes` may be an estimate until the asset was read once. The key has the
    kind and the path, because one file may be used as both kinds."""

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
        return self.stream_frames * self.frame_nbytes

    def stream_ram(self, rounded: Callable[[int], int]) -> int:
        """Bytes in RAM for a stream from disk."""
        return self.stream_frames * rounded(self.frame_nbytes)


class Budgets(msgspec.Struct, frozen=True, kw_only=True):
    """In bytes. `working` is VRAM reserved for the renderer; `actors` limits what actors and their streams take of
    VRAM."""

    vram: int
    ram: int
    scene_slots: int = 5
    working: int = 0
    actors: int | None = None

    @property
    def vram_for_assets(self) -> int:
        return max(0, self.vram - self.working)

    @property
    def vram_for_actors(self) -> int:
        return self.vram_for_assets if self.actors is None else min(self.actors, self.vram_for_assets)


class BudgetLimits(msgspec.Struct, frozen=True, kw_only=True):
    vram: int  # for scenes, actors, and streams beyond the first
    actors: int
    actors_with_streams: int  # for actors, and streams beyond the first
    stream: int  # reserved for one stream, in addition to `vram`
    ram: int
    exchange: int  # part of `ram` for an asset that leaves VRAM while another enters it
    scene_slots: int


def limits_of(assets: Iterable[Asset], budgets: Budgets) -> BudgetLimits:
    """Return the limits. The actors' part stays free even with the largest scenes in all slots."""
    known = list(assets)
    streams = (asset.stream_nbytes for asset in known if asset.kind is Kind.ACTOR)
    stream = max((nbytes for nbytes in streams if nbytes <= budgets.vram_for_actors), default=0)
    largest = sorted((asset.nbytes for asset in known if asset.kind is Kind.SCENE), reverse=True)
    vram = max(0, budgets.vram_for_assets - stream)
    with_streams = max(0, budgets.vram_for_actors - stream)
    actors = max(0, min(with_streams, vram - sum(largest[: budgets.scene_slots])))
    return BudgetLimits(
        vram=vram,
        actors=actors,
        actors_with_streams=with_streams,
        stream=stream,
        ram=budgets.ram,
        exchange=min(max((asset.nbytes for asset in known), default=0), budgets.ram // 4),
        scene_slots=budgets.scene_slots,
    )


def cannot_fit(asset: Asset, limits: BudgetLimits, rounded: Callable[[int], int]) -> str | None:
    """Return why the asset can never fit into these limits, or None if it can."""
    if asset.kind is Kind.ACTOR:
        if asset.stream_nbytes > limits.stream:
            return f"{asset.path}: two of its frames are larger than the VRAM budget for actors"
        fits = min(rounded(asset.nbytes), asset.stream_ram(rounded)) <= limits.ram
        return None if fits else f"{asset.path}: two of its frames are larger than the RAM budget"
    if asset.nbytes > limits.vram:
        return f"{asset.path} is larger than the VRAM budget for assets"
    return None if rounded(asset.nbytes) <= limits.ram else f"{asset.path} is larger than the RAM budget"


class VramAmount(NamedTuple):
    """Scene slots, bytes of VRAM, and bytes of the actors' part of it."""

    slots: int
    total: int
    actors: int

    @classmethod
    def of(cls, asset: Asset) -> "VramAmount":
        is_scene = asset.kind is Kind.SCENE
        return cls(int(is_scene), asset.nbytes, 0 if is_scene else asset.nbytes)

    @classmethod
    def sum_of(cls, assets: Iterable[Asset]) -> "VramAmount":
        return sum(map(cls.of, assets), start=cls(0, 0, 0))

    def __add__(self, other: "VramAmount") -> "VramAmount":  # type: ignore[override]
        return VramAmount(self.slots + other.slots, self.total + other.total, self.actors + other.actors)

    def __sub__(self, other: "VramAmount") -> "VramAmount":
        return VramAmount(self.slots - other.slots, self.total - other.total, self.actors - other.actors)

    def __mul__(self, times: int) -> "VramAmount":  # type: ignore[override]
        return VramAmount(self.slots * times, self.total * times, self.actors * times)

    @property
    def is_positive(self) -> bool:
        return max(self) > 0


class Stage(enum.Enum):
    """The stage of a copy in one tier. A copy takes memory in all three stages."""

    COMING = "coming"
    THERE = "there"
    LEAVING = "leaving"


class Action(enum.Enum):
    READ = "read from disk to RAM"
    PROMOTE = "copy from RAM to VRAM; the copy in RAM stays"
    DEMOTE = "copy from VRAM to RAM, and drop the copy in VRAM"
    DROP_VRAM = "drop the copy in VRAM"
    DROP_RAM = "drop the copy in RAM"


class PlanStep(msgspec.Struct, frozen=True):
    action: Action
    key: str


class StallCause(enum.StrEnum):
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


LABELS_PER_UNIT = 32


class Label(msgspec.Struct, frozen=True, kw_only=True):
    """One output. `name` is its folder in the output root; `value` is passed to the renderer."""

    name: str
    value: Any


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """Labels that need the same scene and the same actor; either may be missing."""

    scene: str | None = None
    actor: str | None = None
    labels: tuple[Label, ...]


def split(units: Iterable[Unit], most: int = LABELS_PER_UNIT) -> list[Unit]:
    """Return the same labels in the same order, in units of at most `most` labels (and at most 32)."""
    most = min(max(1, most), LABELS_PER_UNIT)
    return [
        Unit(scene=unit.scene, actor=unit.actor, labels=unit.labels[first : first + most])
        for unit in units
        for first in range(0, len(unit.labels), most)
    ]


class Future:
    """Hands out units in order. `needed` is the place where each asset is needed next by units not yet handed out;
    `ahead` is the same, soonest first."""

    def __init__(self, units: Sequence[Unit]) -> None:
        """Scenes and actors of `units` are keys of assets."""
        self._units = units
        self._handed = 0
        self._places: dict[str, list[int]] = {}
        for number, unit in enumerate(units):
            for key, place in uses_of(number, unit).items():
                self._places.setdefault(key, []).append(place)
        self.needed = {key: places[0] for key, places in self._places.items()}
        self.ahead = sorted((place, key) for key, place in self.needed.items())

    @property
    def now(self) -> int:
        return 2 * self._handed

    def hand_out(self) -> tuple[int, Unit] | None:
        if self._handed == len(self._units):
            return None
        number, unit = self._handed, self._units[self._handed]
        self._handed += 1
        for key in self.needed.keys() & keys_of(unit):
            self._remove(key)
            place = self.next_after(key, self.now - 1)
            if place is not None:
                self.needed[key] = place
                insort(self.ahead, (place, key))
        return number, unit

    def next_after(self, key: str, place: float) -> int | None:
        places = self._places.get(key, [])
        at = bisect_right(places, place)
        return places[at] if at < len(places) else None

    def count_uses(self, key: str) -> int:
        """Return the number of units not yet handed out that need an asset."""
        places = self._places.get(key, [])
        return len(places) - bisect_left(places, self.now)

    def forget(self, key: str) -> None:
        self._places.pop(key, None)
        if key in self.needed:
            self._remove(key)

    def _remove(self, key: str) -> None:
        del self.ahead[bisect_left(self.ahead, (self.needed.pop(key), key))]


def keys_of(unit: Unit) -> tuple[str, ...]:
    return tuple(key for key in (unit.scene, unit.actor) if key is not None)


def uses_of(number: int, unit: Unit) -> dict[str, int]:
    places = ((unit.scene, 2 * number), (unit.actor, 2 * number + 1))
    return {key: place for key, place in places if key is not None}


def with_keys(unit: Unit) -> Unit:
    """Return the unit with the keys of its assets in place of their paths."""
    scene = None if unit.scene is None else key_of(Kind.SCENE, unit.scene)
    actor = None if unit.actor is None else key_of(Kind.ACTOR, unit.actor)
    return Unit(scene=scene, actor=actor, labels=unit.labels)
