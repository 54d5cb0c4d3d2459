"""Whether a job may start in the place of a running one as soon as that ends: on its devices, with its RAM and CPUs.

The reasons of a plan do not say so. They name what comes first, such as a limit or the lease of the running job, and
nothing that is hidden behind it, such as the memory of a foreign process; and where all devices are full, a plan gives
no reasons. So each place is looked at as if the job that has it had ended now: without its lease, and without it in all
counts. Limits, closed devices, foreign processes, power and the host then decide as they do in a plan.
"""

from collections.abc import Collection, Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.core.lease import Claim, Need
from gpuyard.core.scheduling.device_shares import share_of
from gpuyard.core.scheduling.placement import PlacementState
from gpuyard.core.scheduling.queue_order import Lane
from gpuyard.core.scheduling.rules import RULES, JobRule, Power, StartRequest, first_refusal
from gpuyard.core.scheduling.started import StartedSoFar
from gpuyard.core.scheduling.wait_reasons import PLACES_TAKEN, Reason
from gpuyard.core.scheduling.world import JobFacts, RunningJob, World


class NextJob(Struct, frozen=True, kw_only=True):
    """The next job of a lane that waits, or is like those that wait."""

    job_id: int
    lane: Lane
    need: Need
    facts: JobFacts = JobFacts()


def refused_places(world: World, job: NextJob, places: Iterable[RunningJob]) -> Iterator[RunningJob]:
    """Yield the running jobs in whose places the job may not start. `places` are jobs of its lane with its need: of
    those on the same devices, one is asked for all."""
    need = replace(job.need, ignores_depth=True)  # how many jobs share a device stays the same
    answers: dict[tuple[str, ...], bool] = {}
    for run in places:
        known = answers.get(run.device_ids)
        if known is None:
            known = answers[run.device_ids] = _may_start(world, replace(job, need=need), run)
        if not known:
            yield run


def _may_start(world: World, job: NextJob, run: RunningJob) -> bool:
    others = tuple(each for each in world.running if each.job_id != run.job_id)
    placement, need = PlacementState(world.machine, StartedSoFar(replace(world, running=others))), job.need
    request = StartRequest(need=need, lane=job.lane, facts=job.facts)
    if first_refusal([each for each in RULES if isinstance(each, JobRule)], request, None, placement) is not None:
        return False
    # What is measured of a device shows the job that uses it now: only a new sample says how busy it is without it.
    if need.limits_device_load or not placement.fits_in_place(need, run.device_ids, run.lease_id):
        return False
    shares = tuple(share_of(need, placement.states[device_id].device) for device_id in run.device_ids)
    claimed = replace(request, claim=Claim(shares=shares, host=need.host))
    return first_refusal([each for each in RULES if isinstance(each, Power)], claimed, None, placement) is None


def waits_for_places(reasons: Iterable[Reason], device_ids: Collection[str]) -> bool:
    """Return whether all reasons that concern the machine or these devices are running jobs, which take the places."""
    return all(each.kind in PLACES_TAKEN for each in reasons if each.device_id is None or each.device_id in device_ids)
