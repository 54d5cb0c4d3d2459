"""What the tiers lend, and why they do not."""

import msgspec

from gpuyard.errors import EnvironmentFault
from gpuyard.residency.tiers.asset_copies import Copies


class TiersStopped(Exception):
    """No more is lent: the run is being stopped."""


class TooLarge(EnvironmentFault):
    """An asset cannot be had within the budgets, beside the others."""


class Loan(msgspec.Struct, frozen=True, kw_only=True):
    """Copies that stay where they are until they are given back: in VRAM, or for a stream in RAM or on disk.

    What a stream takes is as it was when it began: its frames may turn out to be larger.
    """

    copies: Copies
    is_streamed: bool = False
    stream_nbytes: int = 0
    stream_ram: int = 0  # from disk


def renewed(error: EnvironmentFault) -> EnvironmentFault:
    """The same words, without the traceback that would grow with each who is told."""
    again = type(error).__new__(type(error), *error.args)
    again.__dict__.update(error.__dict__)
    return again
