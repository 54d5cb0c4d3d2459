"""All exceptions that gpuyard raises on purpose, in one tree.

    GpuyardError
    ├── UserError             the user's mistake: the message says what to type instead
    └── EnvironmentFault      a fault of the machine: the message says what to try
        ├── SimulatedOutOfMemory  a simulated device is full
        ├── DeviceFull        a device has too little free memory for an asset or a render output
        ├── AssetError        a scene's or an actor's file cannot be read
        ├── WaitedTooLong     no device was free in time, or the ledger stayed locked; also a TimeoutError
        ├── StoreFault        the queue's database is damaged or cannot be written
        └── ProbeError        a probe could not read its devices
            ├── ProbeMissing    the tool or library is not installed
            ├── ProbeDenied     it is installed, but this user may not use it
            ├── ProbeTimeout    it did not answer in time
            ├── ProbeCrashed    it exited with an error
            └── ProbeGarbled    its output cannot be parsed

Any other exception that escapes is a bug in gpuyard.
"""


class GpuyardError(Exception):
    """Root of the tree. `message` says what failed and for which thing; `hint` says what to try next."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UserError(GpuyardError):
    """A request that cannot be understood or carried out."""


class EnvironmentFault(GpuyardError):
    """Something on this machine prevents the action."""


class SimulatedOutOfMemory(EnvironmentFault):
    """A simulated device is full. The message reads like CUDA's own."""


class DeviceFull(EnvironmentFault):
    """A device has too little free memory for an asset or for a renderer's output."""


class AssetError(EnvironmentFault):
    """The file of a scene or an actor cannot be read. `path` and the message name the file."""

    def __init__(self, path: str, problem: str, *, hint: str | None = None) -> None:
        # A file name need not be valid UTF-8, and the message must be printable in any case.
        super().__init__(f"{path}: {problem}".encode("utf-8", "backslashreplace").decode(), hint=hint)
        self.path = path


class WaitedTooLong(EnvironmentFault, TimeoutError):
    """No device was free in time (the message says what each device lacked), or the ledger stayed locked."""


class StoreFault(EnvironmentFault):
    """The queue's database is damaged, or cannot be written because the disk is full."""

    def __init__(self, message: str, *, hint: str | None = None, is_damage: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.is_damage = is_damage


class ProbeError(EnvironmentFault):
    """A probe could not read its devices. `source` names the tool or library."""

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
