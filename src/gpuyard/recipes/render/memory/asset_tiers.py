"""Assets in RAM and VRAM: carry out the plan, and lend copies to workers.

One lock guards the state; reading, uploading and downloading run in threads outside the lock, and a new plan is made
when one ends. A waiting worker holds at most a scene, and requests of workers that hold one go first: so some worker
can always continue."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from gpuyard.errors import AssetError, DeviceFull, EnvironmentFault
from gpuyard.recipes.render.memory.asset_copies import (
    AssetUsers,
    Copies,
    EstimateTooLow,
    Loan,
    PartReaders,
    TiersStopped,
    TooLarge,
    add_count,
)
from gpuyard.recipes.render.memory.device_memory import DeviceMemory, as_device_full
from gpuyard.recipes.render.planning.assets_and_units import (
    Action,
    Budgets,
    Future,
    Kind,
    PlanStep,
    Stage,
    StallCause,
    Unit,
    cannot_fit,
    keys_of,
    limits_of,
)
from gpuyard.recipes.render.planning.transfer_plan import PlanState, TransferPlan, plan
from gpuyard.recipes.render.status_file import SkipReason, TransferCounts


class Tiers:
    """A worker asks for a unit with `next_unit`, takes its scene and its actor, and gives both back."""

    def __init__(  # noqa: PLR0913 - the resources, and the work
        self,
        memory: DeviceMemory,
        budgets: Budgets,
        copies: Mapping[str, Copies],
        future: Future,
        *,
        rounded: Callable[[int], int],
        counts: TransferCounts | None = None,
    ) -> None:
        self.memory, self.budgets = memory, budgets
        self._copies, self._future, self._rounded = copies, future, rounded
        self._changed = threading.Condition()
        self._ram, self._vram = dict[str, Stage](), dict[str, Stage]()
        self._users = AssetUsers()
        self._full, self._broken = dict[str, DeviceFull](), dict[str, EnvironmentFault]()
        self._failure: BaseException | None = None
        self._refused: set[str] = set()
        self._short, self._reading, self._readers = 0, 0, 4
        self.is_stopped = False
        threads = {"read": self._readers, "up": 1, "down": 1}
        self._pools = [ThreadPoolExecutor(count, f"gpuyard-{name}") for name, count in threads.items()]
        self._parts = PartReaders(self._readers)
        self._set_limits()
        self.counts = TransferCounts() if counts is None else counts
        self.waits: dict[str, StallCause] = {}

    def next_unit(self) -> tuple[int, Unit] | None:
        """Return the next unit and its number, or None. Both of its assets count as requested from now on."""
        with self._changed:
            handed = None if self.is_stopped else self._future.hand_out()
            if handed is not None:
                self._users.request(*handed)
                self._step()
            return handed

    def take(self, key: str, number: int) -> Loan:
        """Wait for an asset for the unit with that number. Raises AssetError if it is broken, DeviceFull if the device
        has too little memory for it after all."""
        with self._changed:
            self._full.pop(key, None)
            counts = self.counts.counts
            if self._vram.get(key) is Stage.THERE:
                counts.vram_hits += 1
            elif key in self._vram or self._ram.get(key) is Stage.THERE:
                counts.ram_hits += 1
            else:
                counts.misses += 1
            while (loan := self._try_to_lend(key)) is None:
                self._wait(key)
            self._users.lend(loan, key, number)
            counts.streams += loan.is_streamed
            self._update_peaks()
            return loan

    def _wait(self, key: str) -> None:
        cause, started = self.waits.get(key, StallCause.UPLOAD), time.monotonic()
        self._changed.wait()
        stalls = self.counts.stalls_s
        stalls[str(cause)] = stalls.get(cause, 0.0) + time.monotonic() - started

    def _try_to_lend(self, key: str) -> Loan | None:
        if self.is_stopped:
            raise TiersStopped
        if self._failure is not None:
            raise self._failure
        error = self._broken.get(key) or self._full.get(key)
        if error is not None:  # a copy, because the traceback of one error would grow each time that it is raised
            copied = type(error).__new__(type(error), *error.args)
            copied.__dict__.update(error.__dict__)
            raise copied
        copies = self._copies[key]
        if self._vram.get(key) is Stage.THERE:
            return Loan(copies=copies)
        if key not in self._step().streams:
            return None
        in_ram = 0 if key in self._ram else copies.asset.stream_ram(self._rounded)
        return Loan(copies=copies, is_streamed=True, stream_nbytes=copies.asset.stream_nbytes, stream_ram=in_ram)

    def give_back(self, loan: Loan) -> None:
        with self._changed:
            self._users.hold(loan, -1)
            # Waiting workers make a new plan; without any, the next request does.
            self._changed.notify_all()

    def withdraw(self, number: int) -> None:
        with self._changed:
            if self._users.withdraw(number):
                self._changed.notify_all()

    def count_streamed(self, nbytes: int, *, is_from_disk: bool) -> None:
        with self._changed:
            self.counts.moved.streamed += nbytes
            self.counts.moved.read_from_disk += nbytes if is_from_disk else 0

    def _step(self) -> TransferPlan:
        requested = self._users.requested()
        state = PlanState(
            limits=self._limits,
            assets=self._assets,
            ram=self._ram,
            vram=self._vram,
            held=self._users.held.keys(),
            held_ram=self._users.held_ram.keys(),
            requested={key: at for key, at in requested.items() if key not in self._full and key not in self._broken},
            needed=self._future.needed,
            ahead=self._future.ahead,
            next_after=self._future.next_after,
            refused=self._refused,
            is_short=self._short > 0,
            stream_nbytes=self._users.stream_nbytes,
            ram_taken=self.ram_nbytes(),
            readers=self._readers - self._reading,
            now=self._future.now,
            rounded=self._rounded,
        )
        made = plan(state)
        for step in made.steps:
            self._start(step)
        self.waits = made.waits
        self._update_peaks()
        if made.steps:
            self._changed.notify_all()
        return made

    def _set_limits(self) -> None:
        self._assets = {key: copies.asset for key, copies in self._copies.items()}
        self._limits = limits_of(self._assets.values(), self.budgets)

    def _update_peaks(self) -> None:
        self.counts.peak_vram = max(self.counts.peak_vram, self.vram_nbytes())
        self.counts.peak_ram = max(self.counts.peak_ram, self.ram_nbytes())

    def vram_nbytes(self) -> int:
        with self._changed:
            return sum(self._assets[key].nbytes for key in self._vram) + self._users.stream_nbytes

    def ram_nbytes(self) -> int:
        with self._changed:
            return sum(self._rounded(self._assets[key].nbytes) for key in self._ram) + self._users.stream_ram

    def reason(self, unit: Unit, kind: str, reason: str, traceback: str | None = None) -> SkipReason:
        """Return why labels of a unit are skipped, with the sizes of its assets and the memory at this moment."""
        state = {
            "vram_budget": self.budgets.vram,
            "vram_working": self.budgets.working,
            "vram_assets": self.vram_nbytes(),
            "vram_allocator": self.memory.used(),
            "ram_budget": self.budgets.ram,
            "ram_assets": self.ram_nbytes(),
        }
        sizes = {str(self._assets[key].kind): self._assets[key].nbytes for key in keys_of(unit)}
        return SkipReason(kind=kind, reason=reason, traceback=traceback, sizes=sizes, state=state)

    def coming_uses(self) -> dict[str, int]:
        """Return the number of coming units that need each asset in VRAM or in RAM, by its key."""
        with self._changed:
            stages = (*self._vram.items(), *self._ram.items())
            return {key: self._future.count_uses(key) for key, stage in stages if stage is Stage.THERE}

    def paths_in(self, kind: Kind, *, is_ram: bool = False) -> tuple[str, ...]:
        """Return the paths of the assets in VRAM, or in RAM, without those in transfer."""
        with self._changed:
            tier = self._ram if is_ram else self._vram
            present = (self._assets[key] for key in tier if tier[key] is Stage.THERE)
            return tuple(asset.path for asset in present if asset.kind is kind)

    def _start(self, step: PlanStep) -> None:
        key, reading, up, down = step.key, *self._pools
        match step.action:
            case Action.DROP_VRAM:
                self._drop_vram(key)
            case Action.DROP_RAM:
                del self._ram[key]
                self._copies[key].drop_ram()
            case Action.READ:
                self._ram[key] = Stage.COMING
                self._reading += 1
                place = self._users.requested().get(key, self._future.needed.get(key, 0))
                read = partial(self._copies[key].read, partial(self._parts.call_all, place))
                reading.submit(self._carry_out, key, read, self._was_read)
            case Action.PROMOTE:
                self._vram[key] = Stage.COMING
                add_count(self._users.held_ram, key, 1)
                up.submit(self._carry_out, key, self._copies[key].upload, self._was_uploaded)
            case Action.DEMOTE:
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
        except BaseException as raised:  # noqa: BLE001 - raised again in the workers that wait for the asset
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
            self.counts.moved.read_from_disk += copies.pages.nbytes
            self._resize(copies, copies.pages.nbytes, max(layout.nbytes for layout in copies.layouts))
            return
        del self._ram[key]
        if isinstance(error, EstimateTooLow):
            frame_nbytes = -(-copies.asset.frame_nbytes * error.nbytes // copies.asset.nbytes)
            self._resize(copies, error.nbytes, frame_nbytes)
        else:
            self._mark_broken(key, error)

    def _resize(self, copies: Copies, nbytes: int, frame_nbytes: int) -> None:
        resized = msgspec.structs.replace(copies.asset, nbytes=nbytes, frame_nbytes=frame_nbytes)
        if copies.asset != resized:
            copies.asset = resized
            self._change_limits()

    def _change_limits(self) -> None:
        """Compute new limits, and mark all assets that cannot fit: a larger stream reduces the memory for others."""
        self._set_limits()
        for key, asset in self._assets.items():
            reason = None if key in self._broken else cannot_fit(asset, self._limits, self._rounded)
            if reason is not None:
                self._mark_broken(key, TooLarge(reason))

    def learn_frame(self, key: str, nbytes: int) -> TooLarge:
        """Record that a frame is larger than estimated. The current stream of it fails, a later one can succeed."""
        with self._changed:
            copies = self._copies[key]
            if nbytes > copies.asset.frame_nbytes:  # with a margin: other frames may be larger still
                frame_nbytes = nbytes * 5 // 4
                total = max(copies.asset.nbytes, 2 * frame_nbytes)
                copies.asset = msgspec.structs.replace(copies.asset, nbytes=total, frame_nbytes=frame_nbytes)
            reason = f"{copies.asset.path}: a frame is larger in memory than its file"
            self._mark_broken(key, TooLarge(reason))
        return TooLarge(reason)

    def _was_uploaded(self, key: str, error: BaseException | None) -> None:
        add_count(self._users.held_ram, key, -1)
        if error is None:
            self._vram[key] = Stage.THERE
            self._refused.discard(key)
            self.counts.moved.uploaded += self._assets[key].nbytes
            return
        del self._vram[key]
        if (full := as_device_full(error)) is None:
            self._mark_broken(key, error)
        else:
            self._refused.add(key)
            self._full[key] = full

    def _was_downloaded(self, key: str, error: BaseException | None) -> None:
        self._drop_vram(key)
        if error is None:
            self._ram[key] = Stage.THERE
            self.counts.moved.downloaded += self._assets[key].nbytes
        else:
            del self._ram[key]

    def _mark_broken(self, key: str, error: BaseException) -> None:
        if not isinstance(error, AssetError | TooLarge):
            error = AssetError(self._assets[key].path, f"it cannot be loaded: {type(error).__name__}: {error}")
        self._broken[key] = error
        self._future.forget(key)

    @contextlib.contextmanager
    def short(self) -> Iterator[None]:
        """Promote nothing ahead of time in the `with` block: it would use the memory that was just freed."""
        with self._changed:
            self.counts.counts.out_of_memory += 1
            self._short += 1
        try:
            yield
        finally:
            with self._changed:
                self._short -= 1
                self._full.clear()
                self._step()
                self._changed.notify_all()

    def drop_idle(self, kind: Kind, most: int | None = None) -> None:
        """Drop assets of a kind that are not in use from VRAM: all, or the `most` that were least recently used."""
        with self._changed:
            there = (key for key, stage in self._vram.items() if stage is Stage.THERE and not self._users.held[key])
            idle = [key for key in there if self._assets[key].kind is kind]
            for key in sorted(idle, key=self._users.last_use.__getitem__)[:most]:
                self._drop_vram(key)
            self._changed.notify_all()
        self.memory.empty_cache()

    def reserve_working(self, *, is_full: bool = False) -> None:
        """Reserve the VRAM that the renderer was measured to use, but not what the largest scene needs. `is_full`:
        reserve more, after dropping assets has helped, so that it need not happen again."""
        peak = self.memory.peak()  # before the lock, for which other workers wait
        with self._changed:
            more = max(self.budgets.working * 3 // 2, self.budgets.vram // 32)
            largest = max((asset.nbytes for asset in self._assets.values() if asset.kind is Kind.SCENE), default=0)
            most = self.budgets.vram - largest - self._limits.stream
            working = min(more if is_full else peak - self.counts.peak_vram, most)
            if working > self.budgets.working:
                self.budgets = msgspec.structs.replace(self.budgets, working=working)
                self._change_limits()

    def stop(self) -> None:
        with self._changed:
            self.is_stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        """Free everything. No worker uses an asset any more."""
        self.stop()
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)
        self._parts.close()
        with self._changed:
            self._vram.clear()
            self._ram.clear()
        for copies in self._copies.values():
            copies.drop_vram()
            copies.drop_ram()
