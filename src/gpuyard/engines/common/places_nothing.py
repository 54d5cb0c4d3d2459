"""What engines have in common that run attempts at once, on the devices claimed for them."""

from collections.abc import Sequence

from gpuyard.core.cluster.offer import Offer
from gpuyard.core.job.job import Attempt
from gpuyard.ports import Signalling, SiteStatus


class PlacesNothing:
    """Base for these engines: they place nothing themselves. By default no program handles warnings."""

    def signal(self, attempt: Attempt, signum: int) -> int:
        raise NotImplementedError

    def is_ready(self) -> bool:
        return True

    def signal_each(
        self, attempts: Sequence[Attempt], signum: int, how: Signalling = Signalling.ALL
    ) -> Sequence[int | None]:
        return [0 if how is Signalling.HANDLERS else self.signal(attempt, signum) for attempt in attempts]

    def withdraw(self, attempt: Attempt) -> None: ...

    def site_changes(self) -> list[SiteStatus]:
        return []

    def offer(self) -> Offer:
        return Offer()

    def close(self) -> None: ...
