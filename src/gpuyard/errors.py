"""Every exception gpuyard raises on purpose, in one tree.

    GpuyardError
    ├── UserError             your mistake: the message says what to type instead
    └── EnvironmentFault      the machine's fault: the message says what to try
        ├── SimulatedOutOfMemory  a simulated device is full
        ├── DeviceFull        a device has no room for what is to be kept or made there
        ├── AssetError        a scene's or an actor's file cannot be read
        ├── WaitedTooLong     no device, or not the ledger itself, was free in time; also a TimeoutError
        ├── StoreFault        the queue's database is damaged or cannot be written
        └── ProbeError        one way of reading devices did not work
            ├── ProbeMissing    the tool or library is not installed
            ├── ProbeDenied     it is there, but this user may not use it
            ├── ProbeTimeout    it did not answer in time
            ├── ProbeCrashed    it ended with an error
            └── ProbeGarbled    it answered with something that cannot be read

Anything else that escapes is a bug of ours.
"""


class GpuyardError(Exception):
    """The root: `message` says what went wrong with what, `hint` what to try next."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UserError(GpuyardError):
    """What was asked for cannot be understood or done."""


class EnvironmentFault(GpuyardError):
    """Something on this machine stands in the way."""


class SimulatedOutOfMemory(EnvironmentFault):
    """A simulated device is full; the message reads as CUDA's would."""


class DeviceFull(EnvironmentFault):
    """A device has no room for an asset, or for what a renderer makes."""


class AssetError(EnvironmentFault):
    """A scene's or an actor's file cannot be read; `path` names it, and so does the message."""

    def __init__(self, path: str, problem: str, *, hint: str | None = None) -> None:
        # Names of files need not be text: the message can be written down whatever they are.
        super().__init__(f"{path}: {problem}".encode("utf-8", "backslashreplace").decode(), hint=hint)
        self.path = path


class WaitedTooLong(EnvironmentFault, TimeoutError):
    """No device was free in time, and the message says what was missing on each; or the ledger stayed locked."""


class StoreFault(EnvironmentFault):
    """The queue's database is damaged, or cannot be written because the disk is full."""

    def __init__(self, message: str, *, hint: str | None = None, is_damage: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.is_damage = is_damage


class ProbeError(EnvironmentFault):
    """One way of reading devices did not work; `source` names the tool or library."""

    kind = "failed"

    def __init__(self, source: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.source = source

    def __str__(self) -> str:
        return f"{self.source}: {self.message}"


class ProbeMissing(ProbeError):
    kind = "missing"


class ProbeDenied(ProbeError):
    kind = "denied"


class ProbeTimeout(ProbeError):
    kind = "timeout"


class ProbeCrashed(ProbeError):
    kind = "crashed"


class ProbeGarbled(ProbeError):
    kind = "garbled"
