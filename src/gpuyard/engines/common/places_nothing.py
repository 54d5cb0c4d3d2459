"""What engines have in common that run attempts at once, on the devices claimed for them."""

from collections.abc import Sequence

from gpuyard.core.cluster.offer import Offer
from gpuyard.core.job.job import Attempt
from gpuyard.ports import SiteStatus


class PlacesNothing:
    """Base for these engines: they place nothing themselves. By default no program handles warnings."""

    def signal(self, attempt: Attempt, signum: int) -> int:
        raise NotImplementedError

    def is_ready(self) -> bool:
        return True

    def signal_each(self, attempts: Sequence[Attempt], signum: int) -> Sequence[int | None]:
        return [self.signal(attempt, signum) for attempt in attempts]

    def warn_each(self, attempts: Sequence[Attempt], signum: int) -> Sequence[int | None]:  # noqa: ARG002
        return [0 for _ in attempts]

    def send_each(self, attempts: Sequence[Attempt], signum: int) -> None:
        self.signal_each(attempts, signum)

    def withdraw(self, attempt: Attempt) -> None: ...

    def site_changes(self) -> list[SiteStatus]:
        return []

    def offer(self) -> Offer:
        return Offer()

    def close(self) -> None: ...
