"""All engines as one: the local one, and those that place work themselves, opened when there is work for them."""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from gpuyard.core.cluster.offer import Offer
from gpuyard.core.job.job import Attempt
from gpuyard.errors import EnvironmentFault, GpuyardError
from gpuyard.ports import Ended, Engine, Launch, Prepared, SiteStatus

T = TypeVar("T")
_log = logging.getLogger(__name__)
# One that cannot be opened is not tried at each step: to look for it takes a while.
OPEN_AGAIN_S = 30.0


class EngineSet:
    """Implements `ports.Engine`. The attempts of an engine that cannot be opened wait until it can."""

    def __init__(
        self,
        local: Engine,
        open_engine: Callable[[str], Engine] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._local = local
        self._open = open_engine
        self._monotonic = monotonic
        self._elsewhere: dict[str, Engine] = {}
        self._troubles: dict[str, tuple[str, float]] = {}
        self._orphans: dict[str, list[Attempt]] = {}
        self._failing: set[str] = set()

    def prepare(self, launch: Launch, lease_descriptor: int | None) -> Prepared:
        return self._of(launch.engine).prepare(launch, lease_descriptor)

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
                self._of(name)
            except EnvironmentFault as error:
                _log.error("%s; what it has is waited for", error)

    def ended(self) -> list[Ended]:
        for name in list(self._orphans):
            with contextlib.suppress(EnvironmentFault):  # it has been told
                self._of(name)
        return [*self._local.ended(), *self._heard(lambda engine: engine.ended())]

    def signal(self, attempt: Attempt, signum: int) -> int:
        try:
            return self._of(attempt.engine).signal(attempt, signum)
        except EnvironmentFault:
            return 1  # nobody could be asked; whoever is not over by then is to be killed, and asked again and again

    def site_changes(self) -> list[SiteStatus]:
        return self._heard(lambda engine: engine.site_changes())

    def offer(self) -> Offer:
        return self._local.offer()

    def offer_of(self, name: str) -> Offer:
        """What that one will take; its trouble, where it cannot be opened."""
        try:
            return self._of(name).offer()
        except EnvironmentFault as error:
            return Offer(trouble=_with_hint(error))
        except Exception as error:  # noqa: BLE001 - somebody else's code
            return Offer(trouble=f"the engine {name} failed: {type(error).__name__}: {error}")

    def is_shut(self, name: str) -> bool:
        """Whether it could not be opened, and is tried again after a while."""
        return name in self._troubles

    def close(self) -> None:
        for engine in self._all():
            engine.close()

    def _heard(self, ask: Callable[[Engine], list[T]]) -> list[T]:
        """What all of them say; one that fails is somebody else's, and keeps nobody from being heard."""
        told: list[T] = []
        for name, engine in self._elsewhere.items():
            try:
                told += ask(engine)
            except Exception:  # noqa: BLE001 - somebody else's code
                if name not in self._failing:
                    _log.exception("the engine %s failed", name)
                self._failing.add(name)
        return told

    def _all(self) -> list[Engine]:
        return [self._local, *self._elsewhere.values()]

    def _of(self, name: str) -> Engine:
        if not name:
            return self._local
        if name not in self._elsewhere:
            trouble, until = self._troubles.get(name, ("", 0.0))
            if trouble and self._monotonic() < until:
                raise EnvironmentFault(trouble)
            self._elsewhere[name] = self._opened(name)
        return self._elsewhere[name]

    def _opened(self, name: str) -> Engine:
        """With what it had from an earlier daemon."""
        try:
            engine = self._open_elsewhere(name)
        except GpuyardError as error:
            self._troubles[name] = _with_hint(error), self._monotonic() + OPEN_AGAIN_S
            raise EnvironmentFault(self._troubles[name][0]) from error
        self._troubles.pop(name, None)
        if name in self._orphans:
            engine.adopt(self._orphans.pop(name))
        return engine

    def _open_elsewhere(self, name: str) -> Engine:
        if self._open is None:
            raise EnvironmentFault(f"there is no engine {name} here")
        try:
            return self._open(name)
        except GpuyardError:
            raise
        except Exception as error:
            # Somebody else's: whatever is wrong with it is no reason for others to wait.
            raise EnvironmentFault(f"the engine {name} cannot be opened: {type(error).__name__}: {error}") from error


def _with_hint(error: GpuyardError) -> str:
    return f"{error} ({error.hint})" if error.hint else str(error)
