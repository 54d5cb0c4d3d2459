"""The policies that are compared: what each makes of a job's memory, under which rules the controller works.

- `fifo`: one job per device, first in first out.
- `declared`: jobs share devices by what their users declared; one that declared nothing has its device alone.
- `gpuyard`: nobody declares anything; memory is learned as jobs run.

A policy may be varied, as in `gpuyard:load=100:settle=none:jobs=4:first=1`: how busy a device is kept at most, in
percent; after how many seconds a job of which nothing was known is joined by others; how many jobs a device has at
most; and which part of a device has to be free for a job of which nothing is known.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpuyard import config
from gpuyard.control.step import Rules
from gpuyard.core.lease import FixedMemory, Need, UnknownMemory, WholeDevice
from gpuyard.core.scheduling.device_fit import Packing
from gpuyard.core.scheduling.plan import SchedulingLimits
from gpuyard.errors import UserError
from gpuyard.simulator.trace_file import TraceJob

_KNOBS = ("load", "settle", "jobs", "first")


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
    """Who would declare more than there is, and knows better, declares all there is."""
    if job.declared_mb is None:
        return Need(devices=job.gpus)
    return Need(devices=job.gpus, memory=FixedMemory(min(card_mb, job.declared_mb)))


def _by_default() -> Rules:
    """As the daemon has it where nothing is configured."""
    usual = config.PackingConfig()
    packing = Packing(max_jobs_per_device=usual.max_jobs_per_device, max_load_percent=usual.max_load_percent or None)
    return Rules(
        limits=SchedulingLimits(cpu_jobs=1),
        packing=packing,
        first_run_part=usual.first_run_part,
        settle_s=usual.settle_s,
    )


POLICIES = {
    policy.name: policy
    for policy in (
        Policy(name="fifo", need_of=_alone),
        Policy(name="declared", need_of=_as_declared),
        Policy(name="gpuyard", need_of=_learned, rules=_by_default()),
    )
}


def find_policies(texts: Sequence[str]) -> list[Policy]:
    return [find_policy(text) for text in texts]


def find_policy(text: str) -> Policy:
    """By its name, with what is varied of it."""
    name, *varied = text.split(":")
    if name not in POLICIES:
        raise UserError(f"there is no policy '{name}'", hint=f"there are: {', '.join(POLICIES)}")
    policy = replace(POLICIES[name], name=text)
    for each in varied:
        policy = replace(policy, rules=_vary(policy.rules, each))
    return policy


def _vary(rules: Rules, text: str) -> Rules:
    knob, _, value = text.partition("=")
    if knob not in _KNOBS:
        raise UserError(f"a policy cannot be varied by '{text}'", hint=f"vary {', '.join(_KNOBS)}, as in load=100")
    figure = _figure(value, text)
    if knob == "settle":
        return replace(rules, settle_s=figure)
    if knob == "load":
        return replace(rules, packing=replace(rules.packing, max_load_percent=figure))
    if knob == "first":
        return replace(rules, first_run_part=1.0 if figure is None else min(1.0, figure))
    most = None if figure is None else max(1, int(figure))
    return replace(rules, packing=replace(rules.packing, max_jobs_per_device=most))


def _figure(value: str, text: str) -> float | None:
    if value == "none":
        return None
    if not value.replace(".", "", 1).isdecimal():
        raise UserError(f"'{text}' is not a figure of 0 or more, nor none", hint="as in load=100 or load=none")
    return float(value)
