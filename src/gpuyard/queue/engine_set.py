"""All engines behind one interface: the local engine, and cluster engines, which are opened when a job needs them."""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec.structs import replace

from gpuyard.errors import EnvironmentFault, GpuyardError
from gpuyard.model.cluster_terms import Offer
from gpuyard.model.job import Attempt
from gpuyard.ports import AnyEngine, Ended, Engine, HostEngine, IsCutOff, Launch, Prepared, Signalling, SiteStatus

T = TypeVar("T")
Report = TypeVar("Report", Ended, SiteStatus)
_log = logging.getLogger(__name__)
# Opening an engine takes a while, so a failed attempt is not repeated at each step.
OPEN_AGAIN_S = 30.0


class EngineSet:
    """Attempts of an engine that cannot be opened wait until it can. Times of engines become times of the queue."""

    def __init__(
        self,
        local: HostEngine,
        open_engine: Callable[[str], Engine] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        from_wall: Callable[[float], float] = float,
    ) -> None:
        self._local, self._open_engine, self._from_wall = local, open_engine, from_wall
        self._monotonic = monotonic
        self._clusters: dict[str, Engine] = {}
        self._faults: dict[str, tuple[str, float]] = {}  # by engine: message, and when to try again
        self._orphans: dict[str, list[Attempt]] = {}
        self._failing: set[str] = set()

    def prepare(self, launch: Launch, lease_descriptor: int | None) -> Prepared:
        return self._engine(launch.engine).prepare(launch, lease_descriptor)

    def start_prepared(self) -> None:
        for engine in self._all():
            engine.start_prepared()

    def discard_prepared(self) -> None:
        for engine in self._all():
            engine.discard_prepared()

    def adopt(self, attempts: Sequence[Attempt]) -> None:
        self._local.adopt([attempt for attempt in attempts if not attempt.engine])
        for name in dict.fromkeys(attempt.engine for attempt in attempts if attempt.engine):
            self._orphans[name] = [attempt for attempt in attempts if attempt.engine == name]
            try:
                self._cluster(name)
            except EnvironmentFault as error:
                _log.error("%s; its attempts wait until it can be opened", error)

    def ended(self, is_cut_off: IsCutOff | None = None, *, has_unrecorded: bool = False) -> list[Ended]:
        """Return what `HostEngine.ended` does. Cluster engines are asked once all earlier ends are recorded."""
        for name in list(self._orphans):
            with contextlib.suppress(EnvironmentFault):  # `adopt` has logged it
                self._cluster(name)
        ends = self._local.ended(is_cut_off, has_unrecorded=has_unrecorded)
        ends = self._in_queue_time([*ends, *([] if has_unrecorded else self._ask_clusters(lambda each: each.ended()))])
        at = self._from_wall
        return [each if each.warned_at is None else replace(each, warned_at=at(each.warned_at)) for each in ends]

    def is_ready(self) -> bool:
        """Return whether the local engine can start attempts at once; else it gets ready."""
        return self._local.is_ready()

    def begun(self) -> list[SiteStatus]:
        """Return the attempts of slices that have begun. Ask after `ended`, and record them before those ends."""
        return self._in_queue_time(self._local.site_changes())

    def signal_each(
        self, attempts: Sequence[Attempt], signum: int, how: Signalling = Signalling.ALL
    ) -> list[int | None]:
        """Signal each attempt; return the numbers of processes, None where they are still sought."""
        local = [attempt for attempt in attempts if not attempt.engine]
        counts = self._local.signal_each(local, signum, how) if local else []
        known = {each.key: count for each, count in zip(local, counts, strict=True)}
        for each in attempts:
            if each.engine:
                known[each.key] = 1  # also if it cannot be asked now; SIGKILL is repeated until the attempt has ended
                with contextlib.suppress(EnvironmentFault):
                    known[each.key] = self._cluster(each.engine).signal(each, signum)
        return [known[each.key] for each in attempts]

    def withdraw(self, attempts: Sequence[Attempt]) -> set[str]:
        """Return the keys of the attempts whose engine was asked: ask again for those of one that cannot be opened."""
        asked = set[str]()
        for attempt in attempts:
            with contextlib.suppress(EnvironmentFault):
                self._engine(attempt.engine).withdraw(attempt)
                asked.add(attempt.key)
        return asked

    def site_changes(self) -> list[SiteStatus]:
        return self._in_queue_time(self._ask_clusters(lambda engine: engine.site_changes()))

    def offer_of(self, name: str) -> Offer:
        """Return what the engine accepts now; its fault, if it cannot be opened."""
        try:
            return self._cluster(name).offer()
        except EnvironmentFault as error:
            return Offer(trouble=error.with_hint)
        except Exception as error:  # noqa: BLE001 - a plugin's code
            return Offer(trouble=f"the engine {name} failed: {type(error).__name__}: {error}")

    def is_closed(self, name: str) -> bool:
        """Return whether the engine could not be opened."""
        return name in self._faults

    def close(self) -> None:
        """Close the engines that were opened here."""
        for engine in self._clusters.values():
            engine.close()

    def _ask_clusters(self, ask: Callable[[Engine], list[T]]) -> list[T]:
        """Return the answers of all cluster engines. A plugin that raises is logged once and does not affect others."""
        answers: list[T] = []
        for name, engine in self._clusters.items():
            try:
                answers += ask(engine)
            except Exception:  # noqa: BLE001 - a plugin's code
                if name not in self._failing:
                    _log.exception("the engine %s failed", name)
                self._failing.add(name)
        return answers

    def _in_queue_time(self, reports: list[Report]) -> list[Report]:
        return [each if each.at is None else replace(each, at=self._from_wall(each.at)) for each in reports]

    def _all(self) -> list[AnyEngine]:
        return [self._local, *self._clusters.values()]

    def _engine(self, name: str) -> AnyEngine:
        """Return the engine, opened if necessary; EnvironmentFault if it cannot be opened."""
        return self._cluster(name) if name else self._local

    def _cluster(self, name: str) -> Engine:
        if name not in self._clusters:
            fault, until = self._faults.get(name, ("", 0.0))
            if fault and self._monotonic() < until:
                raise EnvironmentFault(fault)
            try:
                if self._open_engine is None:
                    raise EnvironmentFault(f"there is no engine {name} here")
                engine = self._open_engine(name)
            except Exception as error:  # a plugin may raise anything; jobs of other engines must not wait for it
                fault = f"the engine {name} cannot be opened: {type(error).__name__}: {error}"
                fault = error.with_hint if isinstance(error, GpuyardError) else fault
                self._faults[name] = fault, self._monotonic() + OPEN_AGAIN_S
                raise EnvironmentFault(fault) from error
            self._faults.pop(name, None)
            if name in self._orphans:  # attempts from an earlier daemon
                engine.adopt(self._orphans.pop(name))
            self._clusters[name] = engine
        return self._clusters[name]
