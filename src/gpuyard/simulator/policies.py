"""The policies that are compared: the need of a job, and the rules of the controller.

- `fifo`: one job per device, first in first out.
- `declared`: jobs share devices by their declared memory; a job without a declaration gets whole devices.
- `gpuyard`: no declarations; memory is learned as jobs run.

Options follow a name, as in `gpuyard:load=100:jobs=4:quantile=0.95`: `load` is the load limit of a device in percent,
`jobs` the most jobs per device, and `quantile` how sure it must be that jobs of unknown programs fit on a device
together (none: a job of an unknown program gets a whole device).
"""

from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from gpuyard import config
from gpuyard.control.rules import Rules
from gpuyard.core.lease import FixedMemory, Need, UnknownMemory, WholeDevice
from gpuyard.core.memory.expected_peak import sureness_of
from gpuyard.core.scheduling.device_fit import Packing
from gpuyard.core.scheduling.world import SchedulingLimits
from gpuyard.errors import UserError
from gpuyard.simulator.trace_file import TraceJob

_OPTIONS = ("load", "jobs", "quantile", "gain")


class Policy(Struct, frozen=True, kw_only=True):
    """`need_of` returns the need of a job, given the size of the largest device."""

    name: str
    need_of: Callable[[TraceJob, float], Need]
    rules: Rules = Rules(limits=SchedulingLimits(cpu_jobs=1))

    @property
    def learns(self) -> bool:
        """Whether memory is learned from earlier runs."""
        return self.need_of is _learned


def _alone(job: TraceJob, _: float) -> Need:
    return Need(devices=job.gpus)


def _learned(job: TraceJob, _: float) -> Need:
    return Need(devices=job.gpus, memory=UnknownMemory() if job.gpus else WholeDevice())


def _as_declared(job: TraceJob, card_mb: float) -> Need:
    """Return the declared need, at most a whole device: users know how large the devices are."""
    if job.declared_mb is None:
        return Need(devices=job.gpus)
    return Need(devices=job.gpus, memory=FixedMemory(min(card_mb, job.declared_mb)))


# The rules of a daemon without a configuration file.
_CONFIG = config.PackingConfig()
_LEARNING = Rules(
    limits=SchedulingLimits(cpu_jobs=1),
    packing=Packing(
        max_jobs_per_device=_CONFIG.max_jobs_per_device,
        max_load_percent=_CONFIG.max_load_percent or None,
        min_gain_percent=_CONFIG.min_gain_percent,
    ),
    shares_first_runs=_CONFIG.first_run == "share",
)
POLICIES = {
    "fifo": Policy(name="fifo", need_of=_alone),
    "declared": Policy(name="declared", need_of=_as_declared),
    "gpuyard": Policy(name="gpuyard", need_of=_learned, rules=_LEARNING),
}


def find_policy(text: str) -> Policy:
    """Return the policy with this name and these options."""
    name, *options = text.split(":")
    if name not in POLICIES:
        raise UserError(f"there is no policy '{name}'", hint=f"there are: {', '.join(POLICIES)}")
    policy = replace(POLICIES[name], name=text)
    for option in options:
        policy = replace(policy, rules=_apply_option(policy.rules, option))
    return policy


def _apply_option(rules: Rules, text: str) -> Rules:
    option, _, value = text.partition("=")
    if option not in _OPTIONS:
        raise UserError(
            f"'{text}' is not an option of a policy", hint=f"options: {', '.join(_OPTIONS)}, as in load=100"
        )
    if value != "none" and not value.replace(".", "", 1).isdecimal():
        raise UserError(f"'{text}' needs a number of 0 or more, or none", hint="as in load=100 or load=none")
    number = None if value == "none" else float(value)
    if option == "load":
        return replace(rules, packing=replace(rules.packing, max_load_percent=number))
    if option == "quantile":
        if number is not None and not 0.5 <= number < 1.0:
            raise UserError(f"'{text}' is not a quantile", hint="a number from 0.5 up to 0.999, or none")
        sureness = rules.packing.sureness if number is None else sureness_of(number)
        return replace(rules, shares_first_runs=number is not None, packing=replace(rules.packing, sureness=sureness))
    if option == "gain":
        return replace(rules, packing=replace(rules.packing, min_gain_percent=number))
    most = None if number is None else max(1, int(number))
    return replace(rules, packing=replace(rules.packing, max_jobs_per_device=most))
