"""What a driver reports about the health of a device, and what users and daemons have noted about it.

- Figures are as the driver gives them; `core/scheduling/device_health.py` says which of them are faults.
- Unknown is None: the device does not report the figure, or no probe has asked for it yet.
- Times are wall time: they are compared with those of other processes.
"""

from enum import StrEnum

from msgspec import Struct


class Throttle(StrEnum):
    """Why a device runs slower than it could, as far as that is not normal: heat, or the brake of the power supply."""

    SW_THERMAL = "sw-thermal"
    HW_THERMAL = "hw-thermal"
    POWER_BRAKE = "power-brake"
    HW_SLOWDOWN = "hw-slowdown"


class IssueKind(StrEnum):
    LOST = "lost"
    XID = "xid"
    ECC = "ecc"
    REMAP_FAILED = "remap-failed"
    REMAP_PENDING = "remap-pending"
    LINK = "link"
    THROTTLED = "throttled"
    UNRELEASED = "unreleased-memory"


class XidEvent(Struct, frozen=True, kw_only=True):
    """An error that NVIDIA's driver reported by its number, and when this process learned of it."""

    code: int
    at: float


class HealthFigures(Struct, frozen=True, kw_only=True):
    """`ecc_uncorrected` counts since the driver was loaded. `link_width` is in lanes: of a narrow link only while the
    device is busy, as an idle one may save power. `unreleased_mb` is in use although no process is left; `xids` are
    those that this process has seen. `is_lost`: the driver itself says that the device is gone or needs a reset."""

    ecc_uncorrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    throttle: tuple[Throttle, ...] | None = None
    link_width: int | None = None
    link_width_max: int | None = None
    unreleased_mb: float | None = None
    xids: tuple[XidEvent, ...] = ()
    is_lost: bool = False

    @property
    def has_narrow_link(self) -> bool:
        width, most = self.link_width, self.link_width_max
        return width is not None and most is not None and width < most


class HealthMark(Struct, frozen=True, kw_only=True):
    """A note about a device in the ledger: a daemon saw a fault of this `kind` (with its number, if it is an Xid); or
    a user cleared the device, with the figures that it `accepted`."""

    device_id: str
    since: float
    kind: IssueKind | None = None
    xid: int | None = None
    accepted: HealthFigures | None = None
    uid: int = 0
    user: str = ""
