"""What to load, promote, demote and drop, from budgets, sizes, who uses what now and the known future. Pure.

The rules:
1. What is asked for goes first, then what the future needs, soonest first. Nothing is brought at the cost of something
   that is needed sooner, and nothing that is in use is ever touched.
2. The victim is what is needed farthest away, weighed by its bytes. What nobody will need again goes at once.
3. Scenes take at most `scene_slots`. Actors take what the largest scenes that could fill these slots leave. An actor
   that does not fit there, or not beside those in use, is streamed: so nobody waits for room while holding some.
   Room for one stream is always kept, for the same reason.
4. What nobody asks for yet takes no place of something that will be a better victim when it has been used: waiting for
   that moves fewer bytes, and a promotion from RAM is quick. What is asked for takes it: waiting workers cost more.
5. RAM holds what VRAM does not: a copy that is in VRAM as well is the first to go, as no disk is needed to bring it
   back. Then actors that are not needed soon, then scenes, then actors that are. What is read ahead of time leaves room
   for one asset to go down while another comes up, without which each exchange would cost a reading.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from gpuyard.residency.planning.assets import (
    Asset,
    Demote,
    DropRam,
    DropVram,
    Kind,
    Promote,
    Read,
    Stage,
    StallCause,
    Step,
)
from gpuyard.residency.planning.budget_limits import BudgetRoom
from gpuyard.residency.planning.plan_state import NEVER, PlanState, TransferPlan

_SOON = 16  # places: those of the next eight units


def plan(state: PlanState) -> TransferPlan:
    draft = _Draft(state)
    draft.drop_what_nobody_needs()
    draft.evict_what_is_too_much()
    asked = sorted(state.asked, key=lambda key: (state.asked[key], key))
    for key in asked:
        draft.bring_asked(state.assets[key])
    for place, key in state.ahead:
        if draft.is_closed:
            break
        if key not in state.asked:
            draft.bring_ahead(state.assets[key], place)
    return TransferPlan(steps=tuple(draft.steps), waits=draft.waits, streams=frozenset(draft.streams))


class _Draft:
    """The state as it will be when the steps so far are done, or under way where they take time."""

    def __init__(self, state: PlanState) -> None:
        self._state, self._limits = state, state.limits
        self._ram, self._vram = dict(state.ram), dict(state.vram)
        self._taken = BudgetRoom.taken(state.assets[key] for key in state.vram)
        leaving = (key for key, stage in state.vram.items() if stage is Stage.LEAVING)
        self._leaving = BudgetRoom.taken(state.assets[key] for key in leaving)
        self._promoted: set[str] = set()
        self._spare: list[str] | None = None  # copies in RAM, those that go first in front
        self._readers = state.readers
        self._stream_nbytes = state.stream_nbytes
        # Kinds that may still be promoted ahead of time, how many copies there are for that, and whether to read more.
        self._open = set() if state.is_short else {Kind.SCENE} | ({Kind.ACTOR} if state.limits.actors else set())
        promotable = state.ram.keys() - state.vram.keys() - state.asked.keys()
        self._promotable = Counter(state.assets[key].kind for key in promotable)
        self._is_reading_open = bool(state.needed.keys() - state.ram.keys() - state.vram.keys())
        self.steps: list[Step] = []
        self.waits: dict[str, StallCause] = {}
        self.streams: set[str] = set()
        self._ram_free = state.limits.ram - state.ram_taken

    @property
    def is_closed(self) -> bool:
        return not self._is_reading_open and not any(self._promotable[kind] > 0 for kind in self._open)

    def _size(self, key: str) -> int:
        return self._state.assets[key].nbytes

    # What is wanted

    def bring_asked(self, asset: Asset) -> None:
        key = asset.key
        if self._vram.get(key) is Stage.THERE:
            return
        if key in self._vram:
            self.waits[key] = StallCause.UPLOAD
        elif self._ram.get(key) is Stage.THERE:
            self._take_up(asset)
        elif key in self._ram:
            self.waits[key] = StallCause.DISK
        elif asset.kind is Kind.ACTOR and self._in_ram(key) > self._limits.ram:
            self._stream_from_disk(asset)
        else:
            is_for_disk = not self._readers or self._read(asset, self._state.asked[key])
            self.waits[key] = StallCause.DISK if is_for_disk else StallCause.RAM
            self._is_reading_open &= is_for_disk

    def bring_ahead(self, asset: Asset, at: int) -> None:
        key = asset.key
        if key in self._vram:
            return
        if self._ram.get(key) is Stage.THERE:
            self._promotable[asset.kind] -= 1
            if asset.kind in self._open and key not in self._state.refused and not self._is_always_streamed(asset):
                self._promote_ahead(asset, at)
        elif key not in self._ram and self._is_reading_open:
            self._is_reading_open = self._in_ram(key) > self._limits.ram or self._read(asset, at, is_ahead=True)

    def _take_up(self, asset: Asset) -> None:
        if asset.kind is Kind.ACTOR and (self._is_always_streamed(asset) or not self._could_fit_beside_held(asset)):
            self._stream(asset)
            return
        victims = self._vram_victims(asset, self._state.asked[asset.key])
        if victims is None:
            is_slot = asset.kind is Kind.SCENE and self._missing(asset).slots > 0
            self._wait_for_vram(asset, StallCause.SLOT if is_slot else StallCause.VRAM)
        elif self._promote(asset, victims):
            self.waits[asset.key] = StallCause.UPLOAD
        else:
            self._wait_for_vram(asset, StallCause.UPLOAD)

    def _wait_for_vram(self, asset: Asset, cause: StallCause) -> None:
        """What becomes free is for it: nothing is promoted ahead of time until it has that."""
        self.waits[asset.key] = cause
        self._open.clear()

    def _promote_ahead(self, asset: Asset, at: int) -> None:
        victims = self._vram_victims(asset, at)
        of_its_kind = (key for key in self._vram if self._kind(key) is asset.kind)
        is_costly = victims is None or self._are_too_good(victims, at, of_its_kind) or not self._can_go_down(victims)
        if is_costly or not self._promote(asset, victims or []):
            self._open.discard(asset.kind)

    # VRAM

    def _kind(self, key: str) -> Kind:
        return self._state.assets[key].kind

    def _room(self, key: str) -> BudgetRoom:
        return BudgetRoom.of(self._state.assets[key])

    def _is_always_streamed(self, asset: Asset) -> bool:
        return asset.kind is Kind.ACTOR and asset.nbytes > self._limits.actors

    def _set_vram(self, key: str, stage: Stage | None) -> None:
        """Keeps count of what is taken, and of what of it is about to be free."""
        self._spare = None  # what is in VRAM as well may have changed
        before = self._vram.pop(key, None)
        if stage is not None:
            self._vram[key] = stage
        room = self._room(key)
        self._taken += room * ((stage is not None) - (before is not None))
        self._leaving += room * ((stage is Stage.LEAVING) - (before is Stage.LEAVING))

    def _extra_streams(self) -> int:
        return max(0, self._stream_nbytes - self._limits.stream)

    def _whole(self) -> BudgetRoom:
        """What scenes and actors can have, all together."""
        return BudgetRoom(self._limits.scene_slots, self._limits.vram - self._extra_streams(), self._limits.actors)

    def _missing(self, asset: Asset) -> BudgetRoom:
        """What would have to be free for it, too. A scene is not bound by the actors' part."""
        missing = BudgetRoom.of(asset) + self._taken - self._whole()
        return missing if asset.kind is Kind.ACTOR else BudgetRoom(missing.slots, missing.total, 0)

    def _idle(self, after: float, kind: Kind) -> list[str]:
        """Copies in VRAM that nobody uses, and nobody needs before that, the best victim first."""
        found = (
            key
            for key, stage in self._vram.items()
            if stage is Stage.THERE
            and key not in self._state.held
            and self._kind(key) is kind
            and self._state.need_at(key) > after
        )
        return sorted(found, key=self._worth_keeping)

    def _worth_keeping(self, key: str) -> tuple[float, float, str]:
        distance = self._state.need_at(key) - self._state.now
        return -distance * self._size(key), -distance, key

    def _could_fit_beside_held(self, actor: Asset) -> bool:
        idle = self._idle(self._state.asked[actor.key], Kind.ACTOR)
        coming = [key for key, stage in self._vram.items() if stage is Stage.COMING and key not in self._state.asked]
        gains = sum(map(self._room, [*idle, *coming]), start=self._leaving)
        return not (self._missing(actor) - gains).is_more_than_nothing

    def _vram_victims(self, asset: Asset, at: float) -> list[str] | None:
        """Whom to evict for it, besides those that leave already; nothing where that would not do."""
        missing = self._missing(asset) - self._leaving
        if not missing.is_more_than_nothing:
            return []
        idle = self._idle(at, asset.kind)
        if asset.kind is Kind.SCENE and missing.slots <= len(idle):  # actors have bytes, and no slots
            idle += self._idle(at, Kind.ACTOR) if missing.total > 0 else []
        return self._fewest(idle, missing, self._room)

    def _fewest(
        self, candidates: Iterable[str], missing: BudgetRoom, room_of: Callable[[str], BudgetRoom]
    ) -> list[str] | None:
        """The first of them that are enough, less those it is enough without; `None` where all are not enough."""
        chosen: list[str] = []
        for key in candidates:
            if not missing.is_more_than_nothing:
                break
            chosen.append(key)
            missing -= room_of(key)
        if missing.is_more_than_nothing:
            return None
        for key in reversed(chosen[:-1]):
            without = missing + room_of(key)
            if not without.is_more_than_nothing:
                chosen.remove(key)
                missing = without
        return chosen

    def _can_go_down(self, victims: list[str]) -> bool:
        """Whether RAM has room for them, with no copy lost that is nowhere else."""
        doubles = (key for key in self._spare_in_ram(NEVER, None) if self._is_double(key))
        room = self._ram_free + sum(map(self._in_ram, doubles))
        return sum(self._in_ram(key) for key in victims if key not in self._ram) <= room

    def _promote(self, asset: Asset, victims: list[str]) -> bool:
        """Whether it is on its way now; else it follows as soon as those that leave are gone."""
        for key in victims:
            self._evict(key)
        if self._missing(asset).is_more_than_nothing:
            return False
        self.steps.append(Promote(asset.key))
        self._set_vram(asset.key, Stage.COMING)
        self._promoted.add(asset.key)
        return True

    def _evict(self, key: str) -> None:
        need_at = self._state.need_at(key)
        if key not in self._ram and need_at < NEVER and self._make_ram(self._in_ram(key), need_at, keep=key):
            self.steps.append(Demote(key))
            self._set_vram(key, Stage.LEAVING)
            self._take_ram(key)
        else:
            self._drop_vram(key)

    def _drop_vram(self, key: str) -> None:
        self.steps.append(DropVram(key))
        self._set_vram(key, None)

    def _stream_from_disk(self, actor: Asset) -> None:
        nbytes = actor.stream_ram(self._state.rounded)
        if not self._make_ram(nbytes, self._state.asked[actor.key]):
            self.waits[actor.key] = StallCause.RAM
            self._is_reading_open = False
            return
        self._stream(actor)
        if actor.key in self.streams:
            self._ram_free -= nbytes

    def _stream(self, actor: Asset) -> None:
        """The first stream has its room kept; others take what is free, or what idle actors have."""
        extra = max(0, self._stream_nbytes + actor.stream_nbytes - self._limits.stream) - self._extra_streams()
        free = self._limits.vram - self._extra_streams() - self._taken.total
        idle = self._idle(self._state.asked[actor.key], Kind.ACTOR)
        victims = self._fewest(idle, BudgetRoom(0, extra - free, 0), self._room)
        if victims is None and self._stream_nbytes:
            self._wait_for_vram(actor, StallCause.VRAM)
            return
        for key in victims or ():
            self._drop_vram(key)
        self._stream_nbytes += actor.stream_nbytes
        self.streams.add(actor.key)

    # RAM

    def _read(self, asset: Asset, at: float, *, is_ahead: bool = False) -> bool:
        if not self._readers or not self._make_ram(self._in_ram(asset.key), at, is_ahead=is_ahead):
            return False
        self._readers -= 1
        self.steps.append(Read(asset.key))
        self._take_ram(asset.key)
        return True

    def _take_ram(self, key: str) -> None:
        self._ram[key] = Stage.COMING
        self._ram_free -= self._in_ram(key)

    def _make_ram(self, nbytes: int, at: float, keep: str | None = None, *, is_ahead: bool = False) -> bool:
        """Room for so many bytes that are needed then; nothing is dropped where that would not do.

        What is read ahead of time leaves room for one asset to change places with one in VRAM, without which each
        exchange would cost a reading; and it does not take the place of what is needed before something in use is.
        """
        doubles = [key for key in self._spare_in_ram(at, keep) if self._is_double(key)]
        missing = nbytes - self._ram_free - sum(map(self._in_ram, doubles))
        if is_ahead:
            rising = sum(self._in_ram(key) for key in self._ram if self._vram.get(key) is Stage.COMING)
            missing += max(0, self._limits.exchange - rising)
        only = (key for key in self._spare_in_ram(at, keep) if not self._is_double(key))
        victims = self._fewest(only, BudgetRoom(0, missing, 0), lambda key: BudgetRoom(0, self._in_ram(key), 0))
        if victims is None or (is_ahead and self._are_too_good(victims, at, {**self._ram, **self._vram})):
            return False
        for key in victims:
            self._drop_ram(key)
        while self._ram_free < nbytes:
            self._drop_ram(doubles.pop(0))
        return True

    def _are_too_good(self, victims: list[str], at: float, there: Iterable[str]) -> bool:
        """Something that is there and used before that place is needed again only after one of them.

        It will be the better victim when it has been used, and is to be waited for.
        """
        if not victims:
            return False
        soonest = min(map(self._state.need_at, victims))
        for key in there:
            if key in self._state.held or self._state.need_at(key) < at:
                again = self._state.next_after(key, at)
                if again is None or again > soonest:
                    return True
        return False

    def _in_ram(self, key: str) -> int:
        return self._state.rounded(self._size(key))

    def _spare_in_ram(self, after: float, keep: str | None) -> Iterator[str]:
        """What is not in use, and in VRAM as well or needed only after that."""
        if self._spare is None:
            self._spare = sorted(self._ram, key=lambda key: (self._ram_class(key), *self._worth_keeping(key)))
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

    def _ram_class(self, key: str) -> int:
        if self._is_double(key):
            return 0
        if self._kind(key) is Kind.SCENE:
            return 2
        return 1 if self._state.need_at(key) > self._state.now + _SOON else 3

    def _drop_ram(self, key: str) -> None:
        self.steps.append(DropRam(key))
        self._ram_free += self._in_ram(key)
        del self._ram[key]

    def drop_what_nobody_needs(self) -> None:
        state = self._state
        for key in sorted(state.ram.keys() - state.needed.keys() - state.asked.keys()):
            if self._ram[key] is Stage.THERE and key not in state.held_ram:
                self._drop_ram(key)
        for key in sorted(state.vram.keys() - state.needed.keys() - state.asked.keys()):
            if self._vram[key] is Stage.THERE and key not in state.held:
                self._drop_vram(key)

    def evict_what_is_too_much(self) -> None:
        """The limits are lower than they were."""
        for kind in (Kind.ACTOR, Kind.SCENE):
            if not self._is_too_much(kind):
                continue
            for key in self._idle(-NEVER, kind):
                if key not in self._state.asked:
                    self._evict(key)
                if not self._is_too_much(kind):
                    break

    def _is_too_much(self, kind: Kind) -> bool:
        over = self._taken - self._leaving - self._whole()
        return over.total > 0 or (over.actors if kind is Kind.ACTOR else over.slots) > 0
