"""All engines as one: the local one, and those that place work themselves, opened when there is work for them."""

import logging
from collections.abc import Callable, Sequence

from gpuyard.core.away import Offer
from gpuyard.core.jobs import Attempt
from gpuyard.errors import EnvironmentFault, GpuyardError
from gpuyard.ports import Ended, Engine, Launch, Prepared, Seen

_log = logging.getLogger(__name__)


class Engines:
    """Implements `ports.Engine`. The attempts of an engine that cannot be opened wait until it can."""

    def __init__(self, local: Engine, open_engine: Callable[[str], Engine] | None = None) -> None:
        self._local = local
        self._open = open_engine
        self._elsewhere: dict[str, Engine] = {}
        self._troubles: dict[str, str] = {}

    def prepare(self, launch: Launch, lease_descriptor: int | None) -> Prepared:
        return self._of(launch.engine).prepare(launch, lease_descriptor)

    def begin(self) -> None:
        for engine in self._all():
            engine.begin()

    def abandon(self) -> None:
        for engine in self._all():
            engine.abandon()

    def adopt(self, attempts: Sequence[Attempt]) -> None:
        self._local.adopt([attempt for attempt in attempts if not attempt.engine])
        for name in {attempt.engine for attempt in attempts if attempt.engine}:
            try:
                engine = self._of(name)
            except EnvironmentFault as error:
                _log.error("%s; what it has is waited for", error)
                continue
            engine.adopt([attempt for attempt in attempts if attempt.engine == name])

    def ended(self) -> list[Ended]:
        return [ended for engine in self._all() for ended in engine.ended()]

    def signal(self, attempt: Attempt, signum: int) -> int:
        try:
            return self._of(attempt.engine).signal(attempt, signum)
        except EnvironmentFault:
            return 0

    def seen(self) -> list[Seen]:
        return [seen for engine in self._elsewhere.values() for seen in engine.seen()]

    def offer(self) -> Offer:
        return self._local.offer()

    def offer_of(self, name: str) -> Offer:
        """What that one will take; its trouble, where it cannot be opened."""
        try:
            return self._of(name).offer()
        except EnvironmentFault as error:
            return Offer(trouble=_with_hint(error))

    def close(self) -> None:
        for engine in self._all():
            engine.close()

    def _all(self) -> list[Engine]:
        return [self._local, *self._elsewhere.values()]

    def _of(self, name: str) -> Engine:
        if not name:
            return self._local
        if name not in self._elsewhere:
            if name in self._troubles:
                raise EnvironmentFault(self._troubles[name])
            try:
                self._elsewhere[name] = self._open_elsewhere(name)
            except GpuyardError as error:
                self._troubles[name] = _with_hint(error)
                raise EnvironmentFault(self._troubles[name]) from error
        return self._elsewhere[name]

    def _open_elsewhere(self, name: str) -> Engine:
        if self._open is None:
            raise EnvironmentFault(f"there is no engine {name} here")
        return self._open(name)


def _with_hint(error: GpuyardError) -> str:
    return f"{error} ({error.hint})" if error.hint else str(error)
