"""How much RAM and how many CPUs a job reserves: declared amounts, else learned ones, else what is expected.

- A declared amount wins. A learned one is the highest of recent runs with a margin that shrinks with evidence, as for
  the memory of devices. Runs of the program with other arguments count if they are alike.
- A job with devices whose RAM is unknown is charged an expected amount: the median of its program's runs, else of first
  runs on this machine, else a small default. While it runs, this follows what it uses (`expected_ram_mb`).
- A job without devices reserves what it declared, and what was learned only from LEAST_RAM_MB or LEAST_CPUS on: small
  jobs take no lease, which would cost them more than a millisecond each.
- A learned or expected amount never keeps a job from running: it is at most what this machine can give.
"""

import math
import statistics
from collections.abc import Sequence

from msgspec.structs import replace

from gpuyard.model.lease import HostShare, Need
from gpuyard.policy.estimates import Profile
from gpuyard.policy.numbers import (
    ALIKE_FACTOR,
    ASSUMED_RAM_PART,
    CPU_STEP,
    LEAST_CPUS,
    LEAST_RAM_MB,
    RAM_STEP_MB,
    SHOWN_AFTER_S,
)
from gpuyard.policy.sizing import KnownRuns

# By whether the command is exact: the part of the peak that is always added, and the part that shrinks with more runs.
_MARGINS = {True: (0.05, 0.10), False: (0.10, 0.25)}
_LEAST_MARGIN_MB = 64.0
# From then on a running job of unknown RAM is expected to need a little more than it uses.
_MAY_GROW = 1.25


def size_host(
    need: Need, known: KnownRuns, grantable_mb: float | None, declared_mb: float | None = None
) -> HostShare | None:
    """Return what the next run reserves; None if nothing. `grantable_mb` is what the machine can give at most, and
    `declared_mb` what the user declared: the need has more after the job ran out of RAM."""
    declared = need.host or HostShare()
    share = declared
    if declared.ram_mb is None:
        share = _with_ram(share, need, known, grantable_mb)
    elif grantable_mb is not None:
        share = replace(share, ram_mb=min(declared.ram_mb, max(grantable_mb, declared_mb or 0.0)))
    if declared.cpus is None:
        cpus = learned_cpus(known.exact, known.program)
        is_enough = need.devices or share.ram_mb is not None or (cpus or 0.0) >= LEAST_CPUS
        share = replace(share, cpus=cpus, are_cpus_learned=True) if cpus and is_enough else share
    return share if share != HostShare() else None


def _with_ram(share: HostShare, need: Need, known: KnownRuns, grantable_mb: float | None) -> HostShare:
    most_mb = math.inf if grantable_mb is None else grantable_mb
    learned = learned_ram_mb(known.exact, known.program)
    if not need.devices and (learned is None or learned < LEAST_RAM_MB):
        return share
    ram_mb = min(most_mb, expected_before(known, grantable_mb) if learned is None else learned)
    return replace(share, ram_mb=ram_mb, is_ram_expected=learned is None) if ram_mb > 0 else share


def learned_ram_mb(exact: Profile | None, program: Profile | None) -> float | None:
    """Return the RAM of the next run by the most specific profile that says it, with its margin; None if unknown."""
    for profile in (exact, program):
        peaks = () if profile is None else _ram_peaks(profile)
        if profile is None or not peaks or not _is_consistent(profile):
            continue
        high, (lasting, first) = max(peaks), _MARGINS[profile.is_exact]
        margin = max(_LEAST_MARGIN_MB, high * (lasting + first / math.sqrt(len(peaks))))
        return _round_up(high + margin, RAM_STEP_MB)
    return None


def learned_cpus(exact: Profile | None, program: Profile | None) -> float | None:
    """Return the CPUs that earlier runs kept busy, in halves; None if unknown."""
    uses = next((each.cpu_uses for each in (exact, program) if each is not None and each.cpu_uses), None)
    return None if uses is None else _round_up(statistics.median(uses), CPU_STEP)


def expected_before(known: KnownRuns, grantable_mb: float | None) -> float:
    """Return what to expect of a job of unknown RAM before it has run."""
    for profile in (known.program, known.machine):
        if profile is not None and profile.ram_peaks_mb:
            return _round_up(statistics.median(profile.ram_peaks_mb), RAM_STEP_MB)
    return LEAST_RAM_MB if grantable_mb is None else min(LEAST_RAM_MB, ASSUMED_RAM_PART * grantable_mb)


def expected_ram_mb(expected_mb: float, used_mb: float, ran_s: float) -> float:
    """Return what to expect of a running job of unknown RAM: what was expected, until it has shown what it uses."""
    return max(expected_mb, used_mb) if ran_s < SHOWN_AFTER_S else used_mb * _MAY_GROW


def _ram_peaks(profile: Profile) -> Sequence[float]:
    """Return the RAM of past runs; of runs before each was recorded, only the highest."""
    return profile.ram_peaks_mb or (() if profile.ram_mb is None else (profile.ram_mb,))


def _is_consistent(profile: Profile) -> bool:
    peaks: Sequence[float] = profile.ram_peaks_mb
    return profile.is_exact or (len(peaks) > 1 and max(peaks) <= ALIKE_FACTOR * min(peaks))


def _round_up(figure: float, step: float) -> float:
    return math.ceil(figure / step) * step
