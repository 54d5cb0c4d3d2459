"""A site: an engine that places work itself, as the outpost asks it. One call each, which may take its time."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from gpuyard.core.cluster.offer import ClusterTerms, Offer
from gpuyard.errors import EnvironmentFault

# The parcel, and the element's number in it.
Mark = tuple[str, int]


class SiteUnreachable(EnvironmentFault):
    """The site did not answer, or not in a way that can be understood: whatever was asked may have been done."""


class SiteRefused(EnvironmentFault):
    """The site answered, and will not take this: nothing of it was done."""


class SiteState(StrEnum):
    """How the site says an element stands."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed-out"
    OUT_OF_MEMORY = "out-of-memory"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    LOST = "lost"


OVER = frozenset(SiteState) - {SiteState.PENDING, SiteState.RUNNING}


class Sighting(Struct, frozen=True, kw_only=True):
    """`id` is the site's own. `reason` says why it waits, or why it ended so; `place` is where it runs."""

    id: str
    at: SiteState
    reason: str = ""
    place: str = ""
    started_at: float | None = None
    ended_at: float | None = None
    status: int | None = None


class ClusterSubmission(Struct, frozen=True, kw_only=True):
    """Elements that are handed over in one go, on the same terms. `folder` is its own, where all nodes see it; element
    number N is run by `supervisor`, whose last word is to be N. It is `known_as` what `submit` returned."""

    token: str
    terms: ClusterTerms
    count: int
    folder: str
    supervisor: tuple[str, ...]
    known_as: str = ""


class SiteReport(Struct, frozen=True, kw_only=True):
    """All that the site knows of those it was asked about, and what it will take now."""

    sightings: Mapping[Mark, Sighting] = {}
    offer: Offer = Offer()


class Site(Protocol):
    """Every call may raise Unreachable, and nothing else unless it says so. No call lasts for longer than a minute."""

    @property
    def name(self) -> str: ...

    @property
    def most_in_parcel(self) -> int:
        """So many elements at most make a parcel."""

    def submit(self, parcel: ClusterSubmission) -> str:
        """What it is known as there, where that helps to find it again; empty where its token does. Raises Refused
        where the site will have none of it."""

    def look(self, live: Sequence[ClusterSubmission]) -> SiteReport:
        """How all elements of these parcels stand, in as few calls as can be; an element that the site does not know is
        left out."""

    def cancel(self, ids: Sequence[str]) -> None:
        """Ends those that wait and those that run, by the ids of their sightings. What is over already is no error."""

    def output(self, sighting: Sighting) -> bytes | None:
        """What the element wrote, where the site keeps that itself; for elements that left no log of their own."""
