"""Plan which assets to read, promote, demote and drop, from budgets, sizes, current use and the known future. Pure.

The rules:
1. Requested assets come first, then future needs, soonest first. No asset is loaded at the cost of one that is needed
   sooner, and no asset in use is ever touched.
2. The victim is the asset needed farthest in the future, weighted by its bytes. Assets that are never needed again are
   dropped at once.
3. Scenes use at most `scene_slots`. Actors use what the largest scenes in all these slots leave free. An actor that
   does not fit there, or not beside those in use, is streamed: so no worker waits for memory while it holds some.
   Memory for one stream is always reserved, for the same reason. Streams count as actors in the budget for actors.
4. An asset loaded ahead of time does not replace an asset if another one will be a better victim after its use: waiting
   for that moves fewer bytes, and a promotion from RAM is fast. A requested asset does: waiting workers cost more.
5. RAM holds what VRAM does not: a copy that is also in VRAM is dropped first, because restoring it needs no disk. Then
   actors that are not needed soon, then scenes, then actors needed soon. Reads ahead of time leave enough RAM free for
   one asset to be demoted while another is promoted; without it, each exchange would cost a read from disk."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

import msgspec

from gpuyard.recipes.render.planning.assets_and_units import (
    Action,
    Asset,
    BudgetLimits,
    Kind,
    PlanStep,
    Stage,
    StallCause,
    VramAmount,
)

NEVER = math.inf


class PlanState(msgspec.Struct, kw_only=True):
    """The state to plan for. `needed` is the place in the order of work where each asset is needed next, from `now`."""

    limits: BudgetLimits
    assets: Mapping[str, Asset]
    ram: Mapping[str, Stage] = {}
    vram: Mapping[str, Stage] = {}
    held: AbstractSet[str] = frozenset()  # in use in VRAM
    held_ram: AbstractSet[str] = frozenset()  # being copied from RAM
    requested: Mapping[str, int] = {}  # workers wait for it: the place of that work, or before all if it holds a scene
    needed: Mapping[str, int] = {}
    ahead: Sequence[tuple[int, str]] = ()  # `needed`, soonest first
    next_after: Callable[[str, float], int | None]  # the next place after a given place where an asset is needed
    refused: AbstractSet[str] = frozenset()  # the device was too full for it: not tried again before a request
    is_short: bool = False  # the device was out of memory just now: nothing is promoted ahead of time
    stream_nbytes: int = 0  # VRAM used by streams
    ram_taken: int = 0  # RAM used by copies and by streams from disk
    readers: int = 1  # number of reads that can start now
    now: int = 0
    rounded: Callable[[int], int] = int  # rounds a size up to whole pages of RAM

    def need_at(self, key: str) -> float:
        return self.requested.get(key, self.needed.get(key, NEVER))


def plan(state: PlanState) -> "TransferPlan":
    made = TransferPlan(state)
    made.drop_unneeded()
    made.evict_excess()
    for key in sorted(state.requested, key=lambda key: (state.requested[key], key)):
        made.load_requested(state.assets[key])
    for place, key in state.ahead:
        if made.is_closed:
            break
        if key not in state.requested:
            made.load_ahead(state.assets[key], place)
    return made


class TransferPlan:
    """Steps in order, what each requested asset waits for, and the actors to stream now; and the state after the
    steps."""

    def __init__(self, state: PlanState) -> None:
        self._state, self._limits = state, state.limits
        self._ram, self._vram = dict(state.ram), dict(state.vram)
        self._taken = VramAmount.sum_of(state.assets[key] for key in state.vram)
        leaving = (key for key, stage in state.vram.items() if stage is Stage.LEAVING)
        self._leaving = VramAmount.sum_of(state.assets[key] for key in leaving)
        self._promoted: set[str] = set()
        self._spare: list[str] | None = None  # copies in RAM, in the order in which to drop them
        self._readers = state.readers
        self._stream_nbytes = state.stream_nbytes
        # The kinds that may still be promoted ahead of time, the number of candidates, and whether to read ahead.
        self._open = set() if state.is_short else {Kind.SCENE} | ({Kind.ACTOR} if state.limits.actors else set())
        promotable = state.ram.keys() - state.vram.keys() - state.requested.keys()
        self._promotable = Counter(state.assets[key].kind for key in promotable)
        self._is_reading_open = bool(state.needed.keys() - state.ram.keys() - state.vram.keys())
        self.steps: list[PlanStep] = []
        self.waits: dict[str, StallCause] = {}
        self.streams: set[str] = set()
        self._ram_free = state.limits.ram - state.ram_taken

    @property
    def is_closed(self) -> bool:
        return not self._is_reading_open and not any(self._promotable[kind] > 0 for kind in self._open)

    def load_requested(self, asset: Asset) -> None:
        key = asset.key
        if self._vram.get(key) is Stage.THERE:
            return
        if key in self._vram:
            self.waits[key] = StallCause.UPLOAD
        elif self._ram.get(key) is Stage.THERE:
            self._promote_requested(asset)
        elif key in self._ram:
            self.waits[key] = StallCause.DISK
        elif asset.kind is Kind.ACTOR and self._in_ram(key) > self._limits.ram:
            nbytes = asset.stream_ram(self._state.rounded)
            if not self._make_ram(nbytes, self._state.requested[key]):
                self.waits[key] = StallCause.RAM
                self._is_reading_open = False
                return
            self._stream(asset)
            if key in self.streams:
                self._ram_free -= nbytes
        else:
            is_waiting_for_disk = not self._readers or self._read(asset, self._state.requested[key])
            self.waits[key] = StallCause.DISK if is_waiting_for_disk else StallCause.RAM
            self._is_reading_open &= is_waiting_for_disk

    def load_ahead(self, asset: Asset, at: int) -> None:
        key = asset.key
        if key in self._vram:
            return
        if self._ram.get(key) is Stage.THERE:
            self._promotable[asset.kind] -= 1
            if asset.kind not in self._open or key in self._state.refused or self._is_always_streamed(asset):
                return
            victims = self._vram_victims(asset, at)
            same_kind = (key for key in self._vram if self._state.assets[key].kind is asset.kind)
            is_costly = (
                victims is None or self._has_better_victim(victims, at, same_kind) or not self._can_demote(victims)
            )
            if is_costly or not self._promote(asset, victims or []):
                self._open.discard(asset.kind)
        elif key not in self._ram and self._is_reading_open:
            self._is_reading_open = self._in_ram(key) > self._limits.ram or self._read(asset, at, is_ahead=True)

    def _promote_requested(self, asset: Asset) -> None:
        requested = self._state.requested
        if asset.kind is Kind.ACTOR:
            idle = self._idle(requested[asset.key], Kind.ACTOR)
            coming = [key for key, stage in self._vram.items() if stage is Stage.COMING and key not in requested]
            gains = sum(map(self._amount, [*idle, *coming]), start=self._leaving)
            # Beside the actors that are held it does not fit.
            if self._is_always_streamed(asset) or (self._missing(asset) - gains).is_positive:
                self._stream(asset)
                return
        victims = self._vram_victims(asset, requested[asset.key])
        if victims is None:
            is_slot = asset.kind is Kind.SCENE and self._missing(asset).slots > 0
            self._wait_for_vram(asset, StallCause.SLOT if is_slot else StallCause.VRAM)
        elif self._promote(asset, victims):
            self.waits[asset.key] = StallCause.UPLOAD
        else:
            self._wait_for_vram(asset, StallCause.UPLOAD)

    def _wait_for_vram(self, asset: Asset, cause: StallCause) -> None:
        """Reserve the VRAM that becomes free for this asset: nothing is promoted ahead of time until then."""
        self.waits[asset.key] = cause
        self._open.clear()

    def _amount(self, key: str) -> VramAmount:
        return VramAmount.of(self._state.assets[key])

    def _is_always_streamed(self, asset: Asset) -> bool:
        return asset.kind is Kind.ACTOR and asset.nbytes > self._limits.actors

    def _set_vram(self, key: str, stage: Stage | None) -> None:
        """Set the stage of a copy (None: dropped), and update the amounts that are taken and about to be free."""
        self._spare = None  # its order depends on VRAM
        before = self._vram.pop(key, None)
        if stage is not None:
            self._vram[key] = stage
        amount = self._amount(key)
        self._taken += amount * ((stage is not None) - (before is not None))
        self._leaving += amount * ((stage is Stage.LEAVING) - (before is Stage.LEAVING))

    def _extra_streams(self) -> int:
        return max(0, self._stream_nbytes - self._limits.stream)

    def _capacity(self) -> VramAmount:
        limits, streams = self._limits, self._extra_streams()
        actors = min(limits.actors, limits.actors_with_streams - streams)
        return VramAmount(limits.scene_slots, limits.vram - streams, actors)

    def _missing(self, asset: Asset) -> VramAmount:
        """Return what must be freed before the asset fits. The limit of the actors' part does not apply to scenes."""
        missing = VramAmount.of(asset) + self._taken - self._capacity()
        return missing if asset.kind is Kind.ACTOR else VramAmount(missing.slots, missing.total, 0)

    def _idle(self, after: float, kind: Kind) -> list[str]:
        """Return the copies in VRAM that are not in use and not needed until `after`, the best victim first."""
        found = (
            key
            for key, stage in self._vram.items()
            if stage is Stage.THERE
            and key not in self._state.held
            and self._state.assets[key].kind is kind
            and self._state.need_at(key) > after
        )
        return sorted(found, key=self._worth_keeping)

    def _worth_keeping(self, key: str) -> tuple[float, float, str]:
        distance = self._state.need_at(key) - self._state.now
        return -distance * self._state.assets[key].nbytes, -distance, key

    def _vram_victims(self, asset: Asset, at: float) -> list[str] | None:
        """Return the copies to evict for an asset, besides those that leave already; None if that is not enough."""
        missing = self._missing(asset) - self._leaving
        if not missing.is_positive:
            return []
        idle = self._idle(at, asset.kind)
        if asset.kind is Kind.SCENE and missing.slots <= len(idle):  # actors free bytes, but no slots
            idle += self._idle(at, Kind.ACTOR) if missing.total > 0 else []
        return self._choose_fewest(idle, missing, self._amount)

    def _choose_fewest(
        self, candidates: Iterable[str], missing: VramAmount, amount_of: Callable[[str], VramAmount]
    ) -> list[str] | None:
        """Return the first candidates that are enough, without those that prove unnecessary; None if too few."""
        chosen: list[str] = []
        for key in candidates:
            if not missing.is_positive:
                break
            chosen.append(key)
            missing -= amount_of(key)
        if missing.is_positive:
            return None
        for key in reversed(chosen[:-1]):
            without = missing + amount_of(key)
            if not without.is_positive:
                chosen.remove(key)
                missing = without
        return chosen

    def _can_demote(self, victims: list[str]) -> bool:
        """Whether they fit into RAM without dropping the only copy of another asset."""
        doubles = sum(self._in_ram(key) for key in self._spare_in_ram(NEVER, None) if self._is_double(key))
        return sum(self._in_ram(key) for key in victims if key not in self._ram) <= self._ram_free + doubles

    def _promote(self, asset: Asset, victims: list[str]) -> bool:
        """Evict the victims and promote the asset. Return False if it must wait until the victims have left."""
        for key in victims:
            self._evict(key)
        if self._missing(asset).is_positive:
            return False
        self.steps.append(PlanStep(Action.PROMOTE, asset.key))
        self._set_vram(asset.key, Stage.COMING)
        self._promoted.add(asset.key)
        return True

    def _evict(self, key: str) -> None:
        need_at = self._state.need_at(key)
        if key not in self._ram and need_at < NEVER and self._make_ram(self._in_ram(key), need_at, keep=key):
            self.steps.append(PlanStep(Action.DEMOTE, key))
            self._set_vram(key, Stage.LEAVING)
            self._take_ram(key)
        else:
            self._drop_vram(key)

    def _drop_vram(self, key: str) -> None:
        self.steps.append(PlanStep(Action.DROP_VRAM, key))
        self._set_vram(key, None)

    def _stream(self, actor: Asset) -> None:
        """Stream an actor. The first stream has reserved memory; others use free memory, or that of idle actors."""
        extra = max(0, self._stream_nbytes + actor.stream_nbytes - self._limits.stream) - self._extra_streams()
        streams = self._extra_streams() + extra
        over_vram = streams + self._taken.total - self._limits.vram
        missing = VramAmount(0, over_vram, streams + self._taken.actors - self._limits.actors_with_streams)
        idle = self._idle(self._state.requested[actor.key], Kind.ACTOR)
        victims = self._choose_fewest(idle, missing, self._amount)
        if victims is None and self._stream_nbytes:
            self._wait_for_vram(actor, StallCause.VRAM)
            return
        for key in victims or ():
            self._drop_vram(key)
        self._stream_nbytes += actor.stream_nbytes
        self.streams.add(actor.key)

    def _read(self, asset: Asset, at: float, *, is_ahead: bool = False) -> bool:
        if not self._readers or not self._make_ram(self._in_ram(asset.key), at, is_ahead=is_ahead):
            return False
        self._readers -= 1
        self.steps.append(PlanStep(Action.READ, asset.key))
        self._take_ram(asset.key)
        return True

    def _take_ram(self, key: str) -> None:
        self._ram[key] = Stage.COMING
        self._ram_free -= self._in_ram(key)

    def _make_ram(self, nbytes: int, at: float, keep: str | None = None, *, is_ahead: bool = False) -> bool:
        """Free `nbytes` of RAM for an asset needed at `at`. Return False and drop nothing if that is not possible.
        `is_ahead`: by rules 4 and 5."""
        doubles = [key for key in self._spare_in_ram(at, keep) if self._is_double(key)]
        missing = nbytes - self._ram_free - sum(map(self._in_ram, doubles))
        if is_ahead:
            promoting = sum(self._in_ram(key) for key in self._ram if self._vram.get(key) is Stage.COMING)
            missing += max(0, self._limits.exchange - promoting)
        only = (key for key in self._spare_in_ram(at, keep) if not self._is_double(key))
        victims = self._choose_fewest(only, VramAmount(0, missing, 0), lambda key: VramAmount(0, self._in_ram(key), 0))
        if victims is None or (is_ahead and self._has_better_victim(victims, at, {**self._ram, **self._vram})):
            return False
        for key in victims:
            self._drop_ram(key)
        while self._ram_free < nbytes:
            self._drop_ram(doubles.pop(0))
        return True

    def _has_better_victim(self, victims: list[str], at: float, present: Iterable[str]) -> bool:
        """Whether an asset in `present` that is used before `at` is needed again only after one of the victims (rule
        4)."""
        if not victims:
            return False
        soonest = min(map(self._state.need_at, victims))
        for key in present:
            if key in self._state.held or self._state.need_at(key) < at:
                again = self._state.next_after(key, at)
                if again is None or again > soonest:
                    return True
        return False

    def _in_ram(self, key: str) -> int:
        return self._state.rounded(self._state.assets[key].nbytes)

    def _spare_in_ram(self, after: float, keep: str | None) -> Iterator[str]:
        """Return the copies in RAM that are not in use, and that are also in VRAM or needed only after `after`."""

        def rank(key: str) -> int:  # by rule 5; soon are the next eight units, of two places each
            if self._is_double(key):
                return 0
            if self._state.assets[key].kind is Kind.SCENE:
                return 2
            return 1 if self._state.need_at(key) > self._state.now + 16 else 3

        if self._spare is None:
            self._spare = sorted(self._ram, key=lambda key: (rank(key), *self._worth_keeping(key)))
        return (
            key
            for key in self._spare
            if self._ram.get(key) is Stage.THERE
            and key not in self._state.held_ram
            and key not in self._promoted
            and key not in self.streams
            and key != keep
            and (self._is_double(key) or self._state.need_at(key) > after)
        )

    def _is_double(self, key: str) -> bool:
        return self._vram.get(key) is Stage.THERE

    def _drop_ram(self, key: str) -> None:
        self.steps.append(PlanStep(Action.DROP_RAM, key))
        self._ram_free += self._in_ram(key)
        del self._ram[key]

    def drop_unneeded(self) -> None:
        state = self._state
        in_ram, in_vram = (self._ram, state.held_ram, self._drop_ram), (self._vram, state.held, self._drop_vram)
        for tier, held, drop in (in_ram, in_vram):
            for key in sorted(tier.keys() - state.needed.keys() - state.requested.keys() - held):
                if tier[key] is Stage.THERE:
                    drop(key)

    def evict_excess(self) -> None:
        """Evict assets that exceed the limits, which may have become lower."""
        for kind in (Kind.ACTOR, Kind.SCENE):
            for key in self._idle(-NEVER, kind) if self._has_excess(kind) else ():
                if key not in self._state.requested:
                    self._evict(key)
                if not self._has_excess(kind):
                    break

    def _has_excess(self, kind: Kind) -> bool:
        over = self._taken - self._leaving - self._capacity()
        return over.total > 0 or (over.actors if kind is Kind.ACTOR else over.slots) > 0
