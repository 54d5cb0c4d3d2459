"""Claims on the host in one placement: leases, the starts of a plan, and reservations for requests ahead.

What is kept for a job that waits for RAM or CPUs is either reserved now, so that nothing else starts before it; or kept
once the leases that are older than its wait have ended. Then jobs behind it may start in what it leaves over.
"""

import copy
from collections.abc import Collection, Iterator, Sequence

from gpuyard.core.lease import Claim, Holder, HostShare, Lease, Need
from gpuyard.core.scheduling.host_capacity import HostState, HostView, PromisedHostShare, host_refusals
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind, list_holders
from gpuyard.core.snapshot import Host


class HostPlacement:
    """RAM and CPUs of the host, as they fill while a plan is made."""

    def __init__(self, host: Host, view: HostView, leases: Sequence[Lease]) -> None:
        self._host = host
        self.state = HostState.of_leases(host, view, leases)
        self._after: HostState | None = None  # the host once older leases have ended, with what is kept for `_kept_for`
        self._kept_for: Holder | None = None

    def copy(self) -> "HostPlacement":
        return copy.copy(self)

    def lacks(self, need: Need) -> bool:
        """Return whether less RAM or fewer CPUs are free than the need reserves."""
        return self.state.lacks(need) is not None or (self._after is not None and self._after.lacks(need) is not None)

    def refuses(self, need: Need) -> bool:
        """Return whether CPU or RAM are outside the need's own limits, or lack what it reserves."""
        return self.lacks(need) or any(host_refusals(need, self._host))

    def excludes(self, need: Need) -> bool:
        """Return whether the need is refused in a way that the end of all leases would not change."""
        if any(host_refusals(need, self._host)):
            return True
        return self.state.lacks(need) is not None and self.state.without_leases().lacks(need) is not None

    def explain(self, need: Need) -> Iterator[Reason]:
        yield from host_refusals(need, self._host)
        yield from self.state.reasons(need)
        if self.state.lacks(need) is None and self.lacks(need) and self._kept_for is not None:
            text = f"RAM and CPUs reserved for {list_holders((self._kept_for,))}, ahead in the queue"
            yield Reason(ReasonKind.AWAITED, text, holders=(self._kept_for,), is_leased=True)

    def add_claim(self, claim: Claim, holder: Holder, lease_id: str | None = None) -> None:
        if claim.host is not None:
            promise = PromisedHostShare(share=claim.host, holder=holder, lease_id=lease_id)
            self.state = self.state.with_promise(promise)
            self._after = self._after and self._after.with_promise(promise)

    def keep_after(self, older: Collection[str], share: HostShare, holder: Holder) -> None:
        """Keep the share from requests behind once the leases `older` have ended."""
        promise = PromisedHostShare(share=share, holder=holder, is_reservation=True)
        self._after, self._kept_for = self.state.without_leases(older).with_promise(promise), holder

    def reserve(self, share: HostShare | None, holder: Holder) -> None:
        if share is not None:
            promise = PromisedHostShare(share=share, holder=holder, is_reservation=True)
            self.state = self.state.with_promise(promise)
