"""Assets in RAM and VRAM: carries out the plan, and lends the copies to those who ask.

One lock guards all that is known; what takes time (reading, uploading, downloading) happens in threads outside it, and
each end is looked at with a new plan. Work is handed out here too, so that the plan knows who waits for what. Whoever
waits holds nothing but a scene, and those who hold one go first: so there is always somebody who can go on.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec

from gpuyard.errors import DeviceFull, EnvironmentFault
from gpuyard.residency.figures import Figures
from gpuyard.residency.future import Future, keys_of, uses_of
from gpuyard.residency.memory import Memory
from gpuyard.residency.model import Budgets, Demote, DropRam, DropVram, Kind, Promote, Read, Stage, Step, Waits
from gpuyard.residency.moving import Copies, SizeIsWrong
from gpuyard.residency.plan import Plan, State, plan
from gpuyard.residency.room import Limits, cannot_fit, limits_of
from gpuyard.residency.units import Unit

_HOLDS_A_SCENE = 1 << 40  # how much earlier those are served who would hold up others


class Stopped(Exception):
    """No more is lent: the run is being stopped."""


class Loan(msgspec.Struct, frozen=True):
    """Copies that stay where they are until they are given back: in VRAM, or for a stream in RAM or on disk."""

    copies: Copies
    is_streamed: bool
    is_from_disk: bool = False


class Tiers:
    """Ask for work, take its scene and its actor, and give both back."""

    def __init__(  # noqa: PLR0913 - what there is, and what is to come
        self,
        memory: Memory,
        budgets: Budgets,
        copies: Mapping[str, Copies],
        future: Future,
        *,
        rounded: Callable[[int], int] = int,
        readers: int = 4,
    ) -> None:
        self.memory, self.budgets = memory, budgets
        self._copies, self._future, self._rounded = copies, future, rounded
        self._changed = threading.Condition()
        self._ram: dict[str, Stage] = {}
        self._vram: dict[str, Stage] = {}
        self._held: Counter[str] = Counter()
        self._held_ram: Counter[str] = Counter()
        self._asked: dict[tuple[str, int], int] = {}
        self._full: dict[str, DeviceFull] = {}
        self._broken: dict[str, Exception] = {}
        self._refused: set[str] = set()
        self._last_used: dict[str, int] = {}
        self._uses = self._short = self._stream_nbytes = self._stream_ram = self._reading = 0
        self._readers = readers
        self._is_stopped = False
        self._pools = [ThreadPoolExecutor(count, f"gpuyard-{name}") for name, count in _threads(readers).items()]
        self._limits = self._new_limits()
        self.figures = Figures()
        self.waits: dict[str, Waits] = {}

    # Work, and what it needs

    def next_work(self) -> tuple[int, Unit] | None:
        """Both of its assets count as asked for from now on."""
        with self._changed:
            handed = None if self._is_stopped else self._future.hand_out()
            if handed is not None:
                number, unit = handed
                self._asked.update({(key, number): place for key, place in uses_of(number, unit).items()})
                self._step()
            return handed

    def take(self, key: str, number: int) -> Loan:
        """For the work of that number; waits until it can be had.

        AssetError where it is broken, DeviceFull where the device has no room for it after all.
        """
        with self._changed:
            self._full.pop(key, None)
            self._count_hit(key)
            while True:
                loan = self._try(key)
                if loan is not None:
                    self._lend(loan, key, number)
                    return loan
                self._wait(key)

    def _try(self, key: str) -> Loan | None:
        if self._is_stopped:
            raise Stopped
        if key in self._broken:
            raise self._broken[key]
        if key in self._full:
            raise self._full[key]
        if self._vram.get(key) is Stage.THERE:
            return Loan(self._copies[key], is_streamed=False)
        made = self._step()
        if key not in made.streams:
            return None
        return Loan(self._copies[key], is_streamed=True, is_from_disk=key not in self._ram)

    def _lend(self, loan: Loan, key: str, number: int) -> None:
        del self._asked[key, number]
        self._uses += 1
        self._last_used[key] = self._uses
        self._hold(loan, 1)
        self.figures.streams += loan.is_streamed
        for ask, place in self._asked.items():
            if ask[1] == number:
                self._asked[ask] = place - _HOLDS_A_SCENE
        self._look()

    def give_back(self, loan: Loan) -> None:
        with self._changed:
            self._hold(loan, -1)
            # Those who wait plan anew; where nobody does, there is time until more work is asked for.
            self._changed.notify_all()

    def _hold(self, loan: Loan, more: int) -> None:
        """Of what is in use."""
        asset = loan.copies.asset
        if loan.is_streamed:
            self._stream_nbytes += more * asset.stream_nbytes
        if loan.is_from_disk:
            self._stream_ram += more * asset.stream_ram(self._rounded)
        else:
            _count(self._held_ram if loan.is_streamed else self._held, asset.key, more)

    def give_up(self, number: int) -> None:
        """What this work asked for and has not got is no longer asked for."""
        with self._changed:
            left = [ask for ask in self._asked if ask[1] == number]
            for ask in left:
                del self._asked[ask]
            if left:
                self._changed.notify_all()

    def _wait(self, key: str) -> None:
        cause = self.waits.get(key, Waits.UPLOAD)
        began = time.monotonic()
        self._changed.wait()
        stalls = self.figures.stalls_s
        stalls[cause] = stalls.get(cause, 0.0) + time.monotonic() - began

    def _count_hit(self, key: str) -> None:
        if self._vram.get(key) is Stage.THERE:
            self.figures.vram_hits += 1
        elif key in self._vram or self._ram.get(key) is Stage.THERE:
            self.figures.ram_hits += 1
        else:
            self.figures.misses += 1

    def was_streamed(self, nbytes: int, *, is_from_disk: bool) -> None:
        with self._changed:
            self.figures.streamed += nbytes
            self.figures.read_from_disk += nbytes if is_from_disk else 0

    # The plan

    def _step(self) -> Plan:
        made = plan(self._state())
        for step in made.steps:
            self._begin(step)
        self.waits = made.waits
        self._look()
        if made.steps:
            self._changed.notify_all()
        return made

    def _state(self) -> State:
        asked: dict[str, int] = {}
        for (key, _), place in self._asked.items():
            if key not in self._full and key not in self._broken:
                asked[key] = min(place, asked.get(key, place))
        return State(
            limits=self._limits,
            assets=self._assets,
            ram=self._ram,
            vram=self._vram,
            held=self._held.keys(),
            held_ram=self._held_ram.keys(),
            asked=asked,
            needed=self._future.needed,
            ahead=self._future.ahead,
            refused=self._refused,
            is_short=self._short > 0,
            stream_nbytes=self._stream_nbytes,
            ram_taken=self.ram_nbytes(),
            readers=self._readers - self._reading,
            now=self._future.now,
            rounded=self._rounded,
        )

    def _new_limits(self) -> Limits:
        self._assets = {key: copies.asset for key, copies in self._copies.items()}
        return limits_of(self._assets.values(), self.budgets)

    def _look(self) -> None:
        self.figures.peak_vram = max(self.figures.peak_vram, self.vram_nbytes())
        self.figures.peak_ram = max(self.figures.peak_ram, self.ram_nbytes())

    def vram_nbytes(self) -> int:
        with self._changed:
            return sum(self._assets[key].nbytes for key in self._vram) + self._stream_nbytes

    def ram_nbytes(self) -> int:
        with self._changed:
            return sum(self._rounded(self._assets[key].nbytes) for key in self._ram) + self._stream_ram

    def sizes(self, unit: Unit) -> dict[str, int]:
        """Of its assets, by their kinds."""
        assets = (self._assets[key] for key in keys_of(unit))
        return {str(asset.kind): asset.nbytes for asset in assets}

    def memory_state(self) -> dict[str, int]:
        return {
            "vram_budget": self.budgets.vram,
            "vram_working": self.budgets.working,
            "vram_assets": self.vram_nbytes(),
            "vram_allocator": self.memory.used(),
            "ram_budget": self.budgets.ram,
            "ram_assets": self.ram_nbytes(),
        }

    def in_vram(self, kind: Kind) -> tuple[str, ...]:
        """The paths of those that are there."""
        with self._changed:
            there = (self._assets[key] for key, stage in self._vram.items() if stage is Stage.THERE)
            return tuple(asset.path for asset in there if asset.kind is kind)

    def _is(self, key: str, kind: Kind) -> bool:
        return self._assets[key].kind is kind

    # Its steps

    def _begin(self, step: Step) -> None:
        key, reading, up, down = step.key, *self._pools
        match step:
            case DropVram():
                self._drop_vram(key)
            case DropRam():
                del self._ram[key]
                self._copies[key].drop_ram()
            case Read():
                self._ram[key] = Stage.COMING
                self._reading += 1
                reading.submit(self._carry_out, key, self._copies[key].read, self._was_read)
            case Promote():
                self._vram[key] = Stage.COMING
                _count(self._held_ram, key, 1)
                up.submit(self._carry_out, key, self._copies[key].upload, self._was_uploaded)
            case Demote():
                self._vram[key], self._ram[key] = Stage.LEAVING, Stage.COMING
                down.submit(self._carry_out, key, self._copies[key].download, self._was_downloaded)

    def _drop_vram(self, key: str) -> None:
        del self._vram[key]
        self._copies[key].drop_vram()

    def _carry_out(self, key: str, move: Callable[[], object], settle: Callable[[str, Exception | None], None]) -> None:
        error = None
        try:
            move()
        except Exception as raised:  # noqa: BLE001 - raised again in those who wait for the asset
            error = raised
        with self._changed:
            settle(key, error)
            self._step()
            self._changed.notify_all()

    def _was_read(self, key: str, error: Exception | None) -> None:
        self._reading -= 1
        copies = self._copies[key]
        if error is None:
            assert copies.pages is not None
            self._ram[key] = Stage.THERE
            self.figures.read_from_disk += copies.pages.nbytes
            self._resize(copies, copies.pages.nbytes, max(layout.nbytes for layout in copies.layouts))
            return
        del self._ram[key]
        if isinstance(error, SizeIsWrong):
            frame_nbytes = -(-copies.asset.frame_nbytes * error.nbytes // copies.asset.nbytes)
            self._resize(copies, error.nbytes, frame_nbytes)
        else:
            self._is_broken(key, error)

    def _resize(self, copies: Copies, nbytes: int, frame_nbytes: int) -> None:
        if (copies.asset.nbytes, copies.asset.frame_nbytes) == (nbytes, frame_nbytes):
            return
        copies.asset = msgspec.structs.replace(copies.asset, nbytes=nbytes, frame_nbytes=frame_nbytes)
        self._limits = self._new_limits()
        reason = cannot_fit(copies.asset, self._limits, self._rounded)
        if reason is not None:
            self._is_broken(copies.asset.key, TooLarge(reason))

    def _was_uploaded(self, key: str, error: Exception | None) -> None:
        _count(self._held_ram, key, -1)
        if error is None:
            self._vram[key] = Stage.THERE
            self._refused.discard(key)
            self.figures.uploaded += self._assets[key].nbytes
            return
        del self._vram[key]
        if isinstance(error, DeviceFull):
            self._refused.add(key)
            self._full[key] = error
        else:
            self._is_broken(key, error)

    def _was_downloaded(self, key: str, error: Exception | None) -> None:
        self._drop_vram(key)
        if error is None:
            self._ram[key] = Stage.THERE
            self.figures.downloaded += self._assets[key].nbytes
        else:
            del self._ram[key]

    def _is_broken(self, key: str, error: Exception) -> None:
        self._broken[key] = error
        self._future.forget(key)

    # When memory is short

    @contextlib.contextmanager
    def short(self) -> Iterator[None]:
        """Nothing is promoted ahead of time meanwhile: it would take what was just freed."""
        with self._changed:
            self._short += 1
        try:
            yield
        finally:
            with self._changed:
                self._short -= 1
                self._full.clear()
                self._step()
                self._changed.notify_all()

    def drop_idle_actors(self) -> int:
        """Out of VRAM; how many went."""
        with self._changed:
            idle = [key for key in self._idle() if self._is(key, Kind.ACTOR)]
            for key in idle:
                self._drop_vram(key)
            self._changed.notify_all()
        self.memory.empty_cache()
        return len(idle)

    def evict_idle_scene(self) -> bool:
        """The least recently used one, out of VRAM; whether there was one."""
        with self._changed:
            idle = [key for key in self._idle() if self._is(key, Kind.SCENE)]
            if idle:
                self._drop_vram(min(idle, key=lambda key: self._last_used.get(key, 0)))
            self._changed.notify_all()
        self.memory.empty_cache()
        return bool(idle)

    def _idle(self) -> list[str]:
        return [key for key, stage in self._vram.items() if stage is Stage.THERE and not self._held[key]]

    def was_full(self) -> None:
        """More is left to the renderer from now on, so that it does not happen with each label."""
        with self._changed:
            self.figures.out_of_memory += 1
            self._leave(max(self.budgets.working * 3 // 2, self.budgets.vram // 32))

    def learn_working(self) -> None:
        """What the renderer was seen to need for itself is left to it from now on."""
        with self._changed:
            self._leave(self.memory.peak() - self.figures.peak_vram)

    def _leave(self, nbytes: int) -> None:
        """To the renderer, as far as the largest scene leaves it."""
        largest = max((asset.nbytes for asset in self._assets.values() if asset.kind is Kind.SCENE), default=0)
        working = min(nbytes, self.budgets.vram - largest - self._limits.stream)
        if working > self.budgets.working:
            self.budgets = msgspec.structs.replace(self.budgets, working=working)
            self._limits = self._new_limits()

    # The end

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        """Everything is given back: nobody uses anything any more."""
        self.stop()
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)
        for copies in self._copies.values():
            copies.drop_vram()
            copies.drop_ram()


class TooLarge(EnvironmentFault):
    """An asset cannot be had within the budgets."""


def _count(counter: Counter[str], key: str, more: int) -> None:
    counter[key] += more
    if not counter[key]:
        del counter[key]


def _threads(readers: int) -> dict[str, int]:
    return {"read": readers, "up": 1, "down": 1}
