"""A site: what the cluster engine needs from a cluster, such as Slurm or Ray. Calls may take a while."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from gpuyard.core.cluster.offer import ClusterTerms, Offer
from gpuyard.core.job.job import SiteRequest
from gpuyard.errors import EnvironmentFault

# The submission's token, and the element's number in it.
ElementRef = tuple[str, int]


class SiteUnreachable(EnvironmentFault):
    """The site did not answer, or its answer cannot be understood. The request may have been carried out."""


class SiteRefused(EnvironmentFault):
    """The site refused the request. Nothing was done."""


class SiteState(StrEnum):
    """The state of an element at the site."""

    PENDING = "pending"
    RUNNING = "running"
    SUSPENDED = "suspended"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed-out"
    OUT_OF_MEMORY = "out-of-memory"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    LOST = "lost"


OVER = frozenset(SiteState) - {SiteState.PENDING, SiteState.RUNNING, SiteState.SUSPENDED}


class Sighting(Struct, frozen=True, kw_only=True):
    """An element in a report. `id` is the site's own; `reason` is why it waits or how it ended; `place` its node, and
    `node` the site's name for it if that is another."""

    id: str
    at: SiteState
    reason: str = ""
    place: str = ""
    node: str = ""
    started_at: float | None = None
    ended_at: float | None = None
    status: int | None = None


class ClusterNode(Struct, frozen=True, kw_only=True):
    """A node: the site's `name` for it, and people's `place`. `trouble` is why no job can run there now."""

    name: str
    place: str
    trouble: str = ""
    has_gpus: bool = False


class ClusterSubmission(Struct, frozen=True, kw_only=True):
    """Elements that are submitted in one call, on the same terms.

    folder: the submission's own, which all nodes see.
    supervisor: the command that runs element N when N is added as its last argument.
    known_as: what `submit` returned.
    without: the site's names of nodes that must not run it.
    """

    token: str
    terms: ClusterTerms
    count: int
    folder: str
    supervisor: tuple[str, ...]
    known_as: str = ""
    without: tuple[str, ...] = ()


class SiteReport(Struct, frozen=True, kw_only=True):
    """What the site knows about the submissions in question, and what it will take now."""

    sightings: Mapping[ElementRef, Sighting] = {}
    offer: Offer = Offer()


class Site(Protocol):
    """Every call may raise SiteUnreachable, and no other error unless it says so. No call takes over a minute."""

    @property
    def name(self) -> str: ...

    @property
    def most_in_submission(self) -> int:
        """How many elements a submission may have."""

    def submit(self, submission: ClusterSubmission) -> str:
        """Submit all elements. Return the site's name for the submission if that is needed to find it again, else "".

        Raises SiteRefused if the site takes none of it.
        """

    def request(self, submission: ClusterSubmission, number: int) -> SiteRequest:
        """Return what `submit` sends for this element, as users of the site would read it. Asks nothing.

        Raises SiteRefused if it cannot be sent.
        """

    def report(self, live: Sequence[ClusterSubmission]) -> SiteReport:
        """Report all elements of these submissions that the site knows, in as few calls as possible."""

    def cancel(self, ids: Sequence[str]) -> None:
        """End waiting and running elements, by the ids of their sightings. Elements that are over are no error."""

    def output(self, sighting: Sighting) -> bytes | None:
        """Return the element's output if the site keeps it, for elements that left no log."""
