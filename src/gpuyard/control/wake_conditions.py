"""What a plan leaves to be waited for: somebody's room, or what only a look at the machine can tell."""

from gpuyard.core.scheduling.plan import Plan
from gpuyard.core.scheduling.wait_reasons import ReasonKind

# Of the end of these we hear by ourselves.
_TOLD_OF = frozenset(
    {ReasonKind.PAUSED, ReasonKind.TAG_LIMIT, ReasonKind.ARRAY_LIMIT, ReasonKind.CPU_LIMIT, ReasonKind.NOT_ASKED_FOR,
     ReasonKind.BANNED, ReasonKind.TOO_FEW}
)  # fmt: skip
_HELD_BY_SOMEBODY = frozenset({ReasonKind.LEASED, ReasonKind.AWAITED})


def what_is_awaited(plan: Plan) -> tuple[bool, bool]:
    """Whether a job waits for room, and whether for a look."""
    kinds = {reason.kind for hold in plan.waiting for reason in hold.reasons}
    lacks_devices = ReasonKind.TOO_FEW in kinds and not kinds & _HELD_BY_SOMEBODY
    return lacks_devices or not kinds <= _TOLD_OF, lacks_devices or not kinds <= _TOLD_OF | _HELD_BY_SOMEBODY
