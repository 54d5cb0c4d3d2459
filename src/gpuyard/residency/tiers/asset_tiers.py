"""Assets in RAM and VRAM: carries out the plan, and lends the copies to those who ask.

One lock guards all that is known; what takes time (reading, uploading, downloading) happens in threads outside it, and
each end is looked at with a new plan. Work is handed out here too, so that the plan knows who waits for what. Whoever
waits holds nothing but a scene, and those who hold one go first: so there is always somebody who can go on.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec

from gpuyard.errors import AssetError, DeviceFull, EnvironmentFault
from gpuyard.residency.memory.device_memory import DeviceMemory, as_device_full
from gpuyard.residency.planning.assets import (
    Budgets,
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
from gpuyard.residency.planning.budget_limits import BudgetLimits, cannot_fit, limits_of
from gpuyard.residency.planning.plan_state import PlanState, TransferPlan
from gpuyard.residency.planning.render_units import Unit
from gpuyard.residency.planning.transfer_plan import plan
from gpuyard.residency.planning.upcoming_use import Future, keys_of
from gpuyard.residency.tiers.asset_copies import Copies, SizeIsWrong
from gpuyard.residency.tiers.asset_loans import Loan, TiersStopped, TooLarge, renewed
from gpuyard.residency.tiers.asset_users import Uses, change
from gpuyard.residency.tiers.transfer_counts import TransferCounts


class Tiers:
    """Ask for work, take its scene and its actor, and give both back."""

    def __init__(  # noqa: PLR0913 - what there is, and what is to come
        self,
        memory: DeviceMemory,
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
        self._ram, self._vram = dict[str, Stage](), dict[str, Stage]()
        self._uses = Uses()
        self._full, self._broken = dict[str, DeviceFull](), dict[str, EnvironmentFault]()
        self._failure: BaseException | None = None
        self._refused: set[str] = set()
        self._short, self._reading, self._readers = 0, 0, readers
        self.is_stopped = False
        threads = {"read": readers, "up": 1, "down": 1}
        self._pools = [ThreadPoolExecutor(count, f"gpuyard-{name}") for name, count in threads.items()]
        self._limits = self._new_limits()
        self.figures = TransferCounts()
        self.waits: dict[str, StallCause] = {}

    # Work, and what it needs

    def next_work(self) -> tuple[int, Unit] | None:
        """Both of its assets count as asked for from now on."""
        with self._changed:
            handed = None if self.is_stopped else self._future.hand_out()
            if handed is not None:
                self._uses.ask(*handed)
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
                    self._uses.lend(loan, key, number)
                    self.figures.streams += loan.is_streamed
                    self._look()
                    return loan
                self._wait(key)

    def _try(self, key: str) -> Loan | None:
        if self.is_stopped:
            raise TiersStopped
        if self._failure is not None:
            raise self._failure
        for why_not in (self._broken, self._full):
            if key in why_not:
                raise renewed(why_not[key])
        if self._vram.get(key) is Stage.THERE:
            return Loan(copies=self._copies[key])
        made = self._step()
        if key not in made.streams:
            return None
        copies, is_from_disk = self._copies[key], key not in self._ram
        return Loan(
            copies=copies,
            is_streamed=True,
            stream_nbytes=copies.asset.stream_nbytes,
            stream_ram=copies.asset.stream_ram(self._rounded) if is_from_disk else 0,
        )

    def give_back(self, loan: Loan) -> None:
        with self._changed:
            self._uses.give_back(loan)
            # Those who wait plan anew; where nobody does, there is time until more work is asked for.
            self._changed.notify_all()

    def give_up(self, number: int) -> None:
        """What this work asked for and has not got is no longer asked for."""
        with self._changed:
            if self._uses.give_up(number):
                self._changed.notify_all()

    def _wait(self, key: str) -> None:
        cause = self.waits.get(key, StallCause.UPLOAD)
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

    def _step(self) -> TransferPlan:
        made = plan(self._state())
        for step in made.steps:
            self._begin(step)
        self.waits = made.waits
        self._look()
        if made.steps:
            self._changed.notify_all()
        return made

    def _state(self) -> PlanState:
        asked = self._uses.asked()
        return PlanState(
            limits=self._limits,
            assets=self._assets,
            ram=self._ram,
            vram=self._vram,
            held=self._uses.held.keys(),
            held_ram=self._uses.held_ram.keys(),
            asked={key: at for key, at in asked.items() if key not in self._full and key not in self._broken},
            needed=self._future.needed,
            ahead=self._future.ahead,
            next_after=self._future.next_after,
            refused=self._refused,
            is_short=self._short > 0,
            stream_nbytes=self._uses.stream_nbytes,
            ram_taken=self.ram_nbytes(),
            readers=self._readers - self._reading,
            now=self._future.now,
            rounded=self._rounded,
        )

    def _new_limits(self) -> BudgetLimits:
        self._assets = {key: copies.asset for key, copies in self._copies.items()}
        return limits_of(self._assets.values(), self.budgets)

    def _look(self) -> None:
        self.figures.peak_vram = max(self.figures.peak_vram, self.vram_nbytes())
        self.figures.peak_ram = max(self.figures.peak_ram, self.ram_nbytes())

    def vram_nbytes(self) -> int:
        with self._changed:
            return sum(self._assets[key].nbytes for key in self._vram) + self._uses.stream_nbytes

    def ram_nbytes(self) -> int:
        with self._changed:
            return sum(self._rounded(self._assets[key].nbytes) for key in self._ram) + self._uses.stream_ram

    def sizes(self, unit: Unit) -> dict[str, int]:
        """Of its assets, by their kinds."""
        return {str(self._assets[key].kind): self._assets[key].nbytes for key in keys_of(unit)}

    def memory_state(self) -> dict[str, int]:
        return {
            "vram_budget": self.budgets.vram,
            "vram_working": self.budgets.working,
            "vram_assets": self.vram_nbytes(),
            "vram_allocator": self.memory.used(),
            "ram_budget": self.budgets.ram,
            "ram_assets": self.ram_nbytes(),
        }

    def paths_in(self, kind: Kind, *, is_ram: bool = False) -> tuple[str, ...]:
        """Of those that are whole in VRAM, or in RAM."""
        with self._changed:
            tier = self._ram if is_ram else self._vram
            there = (self._assets[key] for key in tier if tier[key] is Stage.THERE)
            return tuple(asset.path for asset in there if asset.kind is kind)

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
                change(self._uses.held_ram, key, 1)
                up.submit(self._carry_out, key, self._copies[key].upload, self._was_uploaded)
            case Demote():
                self._vram[key], self._ram[key] = Stage.LEAVING, Stage.COMING
                down.submit(self._carry_out, key, self._copies[key].download, self._was_downloaded)

    def _drop_vram(self, key: str) -> None:
        del self._vram[key]
        self._copies[key].drop_vram()

    def _carry_out(
        self, key: str, move: Callable[[], object], settle: Callable[[str, BaseException | None], None]
    ) -> None:
        error = None
        try:
            move()
        except BaseException as raised:  # noqa: BLE001 - raised again in those who wait for the asset
            error = raised
        with self._changed:
            try:
                settle(key, error)
                self._step()
            except BaseException as failure:
                self._failure = failure
                raise
            finally:
                self._changed.notify_all()

    def _was_read(self, key: str, error: BaseException | None) -> None:
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
        self._set_aside_what_cannot_fit()

    def _set_aside_what_cannot_fit(self) -> None:
        """Any of them: what is kept for one's stream is taken from all."""
        for key, asset in self._assets.items():
            reason = None if key in self._broken else cannot_fit(asset, self._limits, self._rounded)
            if reason is not None:
                self._is_broken(key, TooLarge(reason))

    def learn_frame(self, key: str, nbytes: int) -> TooLarge:
        """A frame is larger than was estimated: what streams it now cannot, and what streams it after that can."""
        with self._changed:
            copies = self._copies[key]
            if nbytes > copies.asset.frame_nbytes:  # some more: others may be larger still
                frame_nbytes = nbytes * 5 // 4
                total = max(copies.asset.nbytes, 2 * frame_nbytes)
                copies.asset = msgspec.structs.replace(copies.asset, nbytes=total, frame_nbytes=frame_nbytes)
            reason = f"{copies.asset.path}: a frame is larger in memory than its file is"
            self._is_broken(key, TooLarge(reason))
        return TooLarge(reason)

    def _was_uploaded(self, key: str, error: BaseException | None) -> None:
        change(self._uses.held_ram, key, -1)
        if error is None:
            self._vram[key] = Stage.THERE
            self._refused.discard(key)
            self.figures.uploaded += self._assets[key].nbytes
            return
        del self._vram[key]
        full = as_device_full(error)
        if full is not None:
            self._refused.add(key)
            self._full[key] = full
        else:
            self._is_broken(key, error)

    def _was_downloaded(self, key: str, error: BaseException | None) -> None:
        self._drop_vram(key)
        if error is None:
            self._ram[key] = Stage.THERE
            self.figures.downloaded += self._assets[key].nbytes
        else:
            del self._ram[key]

    def _is_broken(self, key: str, error: BaseException) -> None:
        if not isinstance(error, AssetError | TooLarge):
            error = AssetError(self._assets[key].path, f"it cannot be had: {type(error).__name__}: {error}")
        self._broken[key] = error
        self._future.forget(key)

    # When memory is short

    @contextlib.contextmanager
    def short(self) -> Iterator[None]:
        """Nothing is promoted ahead of time meanwhile: it would take what was just freed."""
        with self._changed:
            self.figures.out_of_memory += 1
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
            idle = self._idle(Kind.ACTOR)
            for key in idle:
                self._drop_vram(key)
            self._changed.notify_all()
        self.memory.empty_cache()
        return len(idle)

    def evict_idle_scene(self) -> bool:
        """The least recently used one, out of VRAM; whether there was one."""
        with self._changed:
            idle = self._idle(Kind.SCENE)
            if idle:
                self._drop_vram(min(idle, key=self._uses.last_use))
            self._changed.notify_all()
        self.memory.empty_cache()
        return bool(idle)

    def _idle(self, kind: Kind) -> list[str]:
        there = [key for key, stage in self._vram.items() if stage is Stage.THERE and not self._uses.held[key]]
        return [key for key in there if self._assets[key].kind is kind]

    def leave_more(self) -> None:
        """Dropping assets helped: more is left to the renderer from now on, so that it need not happen again."""
        with self._changed:
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
            self._set_aside_what_cannot_fit()

    # The end

    def stop(self) -> None:
        with self._changed:
            self.is_stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        """Everything is given back: nobody uses anything any more."""
        self.stop()
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)
        for copies in self._copies.values():
            copies.drop_vram()
            copies.drop_ram()
