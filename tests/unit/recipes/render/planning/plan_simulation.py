"""A simulation of the plan without threads: it keeps the state, carries out the steps, and plays the workers.

Every possible next event is one of its `moves`: a read, an upload or a download ends, or a worker acts.
The driver picks one. A worker that waits and is not notified of a change can do nothing, as in a real program. All
invariants are checked after each step.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import msgspec

from gpuyard.recipes.render.planning.assets_and_units import (
    Action,
    Asset,
    BudgetLimits,
    Budgets,
    Future,
    Kind,
    Label,
    PlanStep,
    Stage,
    Unit,
    cannot_fit,
    key_of,
    keys_of,
    limits_of,
    uses_of,
)
from gpuyard.recipes.render.planning.transfer_plan import PlanState, TransferPlan, plan

_HOLDS_A_SCENE = 1 << 40
ONE_LABEL = (Label(name="label", value=None),)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """The units and the budgets of a simulation."""

    assets: dict[str, Asset]
    units: tuple[Unit, ...]
    budgets: Budgets
    workers: int = 1
    readers: int = 4
    page: int = 1

    def rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.page) * self.page

    def limits(self, units: Sequence[Unit]) -> BudgetLimits:
        return limits_of([self.assets[key] for key in _keys(units)], self.budgets)

    def that_fit(self) -> list[Unit]:
        """Return the units that can fit; a run does not start the others."""
        limits = self.limits(self.units)
        broken = {key for key in _keys(self.units) if cannot_fit(self.assets[key], limits, self.rounded) is not None}
        return [unit for unit in self.units if not broken.intersection(keys_of(unit))]


def _keys(units: Sequence[Unit]) -> list[str]:
    return sorted({key for unit in units for key in keys_of(unit)})


def scene(number: int, nbytes: int) -> Asset:
    return Asset(key=key_of(Kind.SCENE, f"s{number}"), kind=Kind.SCENE, nbytes=nbytes, frame_nbytes=nbytes)


def actor(number: int, nbytes: int, frame_nbytes: int | None = None) -> Asset:
    frame = nbytes if frame_nbytes is None else frame_nbytes
    return Asset(key=key_of(Kind.ACTOR, f"a{number}"), kind=Kind.ACTOR, nbytes=nbytes, frame_nbytes=frame)


def unit(scene: int | None = None, actor: int | None = None, labels: tuple[Label, ...] = ONE_LABEL) -> Unit:
    return Unit(
        scene=None if scene is None else key_of(Kind.SCENE, f"s{scene}"),
        actor=None if actor is None else key_of(Kind.ACTOR, f"a{actor}"),
        labels=labels,
    )


def case_of(assets: Sequence[Asset], units: Sequence[Unit], budgets: Budgets, **more: int) -> Case:
    return Case(assets={asset.key: asset for asset in assets}, units=tuple(units), budgets=budgets, **more)


class Loan(msgspec.Struct, frozen=True):
    key: str
    is_streamed: bool


class SimulatedWorker:
    """A worker: it takes its scene, then its actor, works, and returns them in reverse order."""

    def __init__(self) -> None:
        self.place = -1
        self.unit: Unit | None = None
        self.to_take: list[str] = []
        self.loans: list[Loan] = []
        self.is_waiting = False
        self.is_done = False

    @property
    def is_working(self) -> bool:
        return self.unit is not None and not self.to_take


class PlanSimulation:
    """A simulated run of a case. It ends when every unit is done; AssertionError if an invariant is violated."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.units = case.that_fit()
        self.limits = case.limits(self.units)
        self.assets = {key: case.assets[key] for key in _keys(self.units)}
        self.future = Future(self.units)
        self.ram: dict[str, Stage] = {}
        self.vram: dict[str, Stage] = {}
        self.held: Counter[str] = Counter()
        self.held_ram: Counter[str] = Counter()
        self.asked: dict[tuple[str, int], int] = {}
        self.transfers: list[PlanStep] = []
        self.workers = [SimulatedWorker() for _ in range(case.workers)]
        self.stream_nbytes = self.stream_ram = 0
        self.done: list[int] = []
        self.read_nbytes = self.uploaded = self.streamed = self.downloaded = 0
        self._ends_in_a_row = self._moves_left = 0

    # Events

    def moves(self) -> list[Callable[[], None]]:
        return [*self.ends(), *self.acts()]

    def ends(self) -> list[Callable[[], None]]:
        return [lambda transfer=transfer: self._end(transfer) for transfer in self.transfers]  # type: ignore[misc]

    def acts(self) -> list[Callable[[], None]]:
        able = [worker for worker in self.workers if not worker.is_waiting and not worker.is_done]
        return [lambda worker=worker: self._act(worker) for worker in able]  # type: ignore[misc]

    def run(self, pick: Callable[["PlanSimulation"], Callable[[], None]]) -> "PlanSimulation":
        self._moves_left = 200 * (len(self.units) + len(self.workers) + 1) * (len(self.workers) + 1)
        while not all(worker.is_done for worker in self.workers):
            assert self.moves(), f"nothing can happen, but {self._what_waits()} is left"
            self._moves_left -= 1
            assert self._moves_left, f"it never ends: {self._what_waits()}"
            pick(self)()
            self._check()
        assert sorted(self.done) == list(range(len(self.units)))
        return self

    def _what_waits(self) -> str:
        waits = [f"{worker.unit} at {worker.to_take}" for worker in self.workers if worker.to_take]
        return f"{waits} of {self.ram} {self.vram} held {dict(self.held)} streams {self.stream_nbytes}"

    def _act(self, worker: SimulatedWorker) -> None:
        self._ends_in_a_row = 0
        if worker.unit is None:
            self._begin_work(worker)
        elif worker.to_take:
            self._try(worker)
        elif worker.loans:
            self._give_back(worker.loans.pop())
        else:
            self.done.append(worker.place)
            worker.unit = None

    def _begin_work(self, worker: SimulatedWorker) -> None:
        handed = self.future.hand_out()
        if handed is None:
            worker.is_done = True
            return
        worker.place, worker.unit = handed
        worker.to_take = list(keys_of(worker.unit))
        self.asked.update({(key, worker.place): place for key, place in uses_of(worker.place, worker.unit).items()})
        self._step()

    def _try(self, worker: SimulatedWorker) -> None:
        key = worker.to_take[0]
        if self.vram.get(key) is Stage.THERE:
            self._lend(worker, Loan(key, is_streamed=False))
        elif key in self._step().streams:
            self._lend(worker, Loan(key, is_streamed=True))
        else:
            worker.is_waiting = True

    def _lend(self, worker: SimulatedWorker, loan: Loan) -> None:
        worker.loans.append(loan)
        worker.to_take.remove(loan.key)
        del self.asked[loan.key, worker.place]
        if loan.is_streamed:
            assert worker.unit is not None
            self.stream_nbytes += self.assets[loan.key].stream_nbytes
            if loan.key in self.ram:
                self.held_ram[loan.key] += 1
            else:
                self.stream_ram += self.assets[loan.key].stream_ram(self.case.rounded)
            self.streamed += self._size(loan.key) * len(worker.unit.labels)
            if loan.key not in self.ram:
                self.read_nbytes += self._size(loan.key) * len(worker.unit.labels)
        else:
            self.held[loan.key] += 1
        for ask, place in self.asked.items():
            if ask[1] == worker.place:
                self.asked[ask] = place - _HOLDS_A_SCENE

    def _give_back(self, loan: Loan) -> None:
        if loan.is_streamed:
            self.stream_nbytes -= self.assets[loan.key].stream_nbytes
        if loan.is_streamed and self._is_larger_than_ram(loan.key):
            self.stream_ram -= self.assets[loan.key].stream_ram(self.case.rounded)
        else:
            _less(self.held_ram if loan.is_streamed else self.held, loan.key)
        self._notify()

    def _notify(self) -> None:
        for worker in self.workers:
            worker.is_waiting = False

    # The plan

    def _step(self) -> TransferPlan:
        asked: dict[str, int] = {}
        for (key, _), place in self.asked.items():
            asked[key] = min(place, asked.get(key, place))
        made = plan(
            PlanState(
                limits=self.limits,
                assets=self.assets,
                ram=self.ram,
                vram=self.vram,
                held=self.held.keys(),
                held_ram=self.held_ram.keys(),
                requested=asked,
                needed=self.future.needed,
                ahead=self.future.ahead,
                next_after=self.future.next_after,
                stream_nbytes=self.stream_nbytes,
                ram_taken=self._ram_taken(),
                readers=self.case.readers - sum(transfer.action is Action.READ for transfer in self.transfers),
                now=self.future.now,
                rounded=self.case.rounded,
            )
        )
        for step in made.steps:
            self._begin(step)
            self._check()
        if made.steps:
            self._notify()
        assert all(self.ram.get(key) is Stage.THERE or self._is_larger_than_ram(key) for key in made.streams)
        return made

    def _begin(self, step: PlanStep) -> None:
        key = step.key
        match step.action:
            case Action.READ:
                assert key not in self.ram, f"{key} is read, and in RAM"
                assert key not in self.vram, f"{key} is read, and in VRAM"
                self.ram[key] = Stage.COMING
            case Action.PROMOTE:
                assert self.ram.get(key) is Stage.THERE, f"{key} is promoted, and not in RAM"
                assert key not in self.vram, f"{key} is promoted, and in VRAM"
                self.vram[key] = Stage.COMING
                self.held_ram[key] += 1
            case Action.DEMOTE:
                assert key not in self.ram, f"{key} is demoted, and in RAM"
                self._check_idle(key)
                self.vram[key], self.ram[key] = Stage.LEAVING, Stage.COMING
            case Action.DROP_VRAM:
                self._check_idle(key)
                del self.vram[key]
            case Action.DROP_RAM:
                assert self.ram.get(key) is Stage.THERE, f"{key} is dropped, and not in RAM"
                assert not self.held_ram[key], f"{key} is dropped, and is being copied"
                del self.ram[key]
        if step.action in (Action.READ, Action.PROMOTE, Action.DEMOTE):
            self.transfers.append(step)

    def _end(self, transfer: PlanStep) -> None:
        key, size = transfer.key, self._size(transfer.key)
        self.transfers.remove(transfer)
        match transfer.action:
            case Action.READ:
                self.ram[key] = Stage.THERE
                self.read_nbytes += size
            case Action.PROMOTE:
                self.vram[key] = Stage.THERE
                _less(self.held_ram, key)
                self.uploaded += size
            case Action.DEMOTE:
                del self.vram[key]
                self.ram[key] = Stage.THERE
                self.downloaded += size
        self._step()
        self._notify()
        self._ends_in_a_row += 1
        assert self._ends_in_a_row <= 4 * len(self.assets) + 4, "prefetching never comes to rest"

    # Invariants

    def _check_idle(self, key: str) -> None:
        assert self.vram.get(key) is Stage.THERE, f"{key} leaves VRAM, and is not there"
        assert not self.held[key], f"{key} leaves VRAM, and is in use"

    def _check(self) -> None:
        limits = self.limits
        assert self._ram_taken() <= limits.ram
        assets = sum(map(self._size, self.vram))
        assert assets + self.stream_nbytes <= self.case.budgets.vram_for_assets
        assert assets <= limits.vram
        actors = sum(self._size(key) for key in self.vram if self._kind(key) is Kind.ACTOR)
        assert actors <= limits.actors
        assert actors + self.stream_nbytes <= self.case.budgets.vram_for_actors
        assert sum(self._kind(key) is Kind.SCENE for key in self.vram) <= limits.scene_slots
        assert all(self.vram.get(key) is Stage.THERE for key in self.held)
        assert all(self.ram.get(key) is Stage.THERE for key in self.held_ram)
        assert sum(transfer.action is Action.READ for transfer in self.transfers) <= self.case.readers

    def _ram_taken(self) -> int:
        return sum(self.case.rounded(self._size(key)) for key in self.ram) + self.stream_ram

    def _is_larger_than_ram(self, key: str) -> bool:
        return self.case.rounded(self._size(key)) > self.limits.ram

    def _size(self, key: str) -> int:
        return self.assets[key].nbytes

    def _kind(self, key: str) -> Kind:
        return self.assets[key].kind


Pick = Callable[[PlanSimulation], Callable[[], None]]


def at_random(seed: int) -> Pick:
    random = Random(seed)
    return lambda simulation: random.choice(simulation.moves())


def moving_first(simulation: PlanSimulation) -> Callable[[], None]:
    """Transfers end before any worker continues: prefetching is as early as possible."""
    return (simulation.ends() or simulation.acts())[0]


def working_first(simulation: PlanSimulation) -> Callable[[], None]:
    """Transfers end only when no worker can continue: prefetching is as late as possible."""
    return (simulation.acts() or simulation.ends())[0]


def _less(counter: Counter[str], key: str) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
