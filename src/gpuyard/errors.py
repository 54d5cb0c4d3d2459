"""All exceptions that gpuyard raises on purpose, in one tree: a UserError is the user's mistake, and says what to type
instead; an EnvironmentFault is a fault of the machine, and says what to try. Any other exception that escapes is a bug
in gpuyard.

Each error has a `code` for programs, which never changes: in HTTP answers, in the exceptions of `gpuyard.Client`, and
in the JSON that the command line prints with `--json`."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final

# Every code, and what it means.
CODES: "Final[dict[str, str]]" = {
    "usage": "the request cannot be understood or is not allowed",
    "not_found": "the job, route or file does not exist",
    "impossible": "the job can never run on this machine, or on its cluster",
    "conflict": "the present state does not allow it",
    "denied": "the token is missing or wrong, or this client may not do it",
    "too_large": "the request is too large",
    "rate_limited": "too many requests in a short time",
    "version": "the daemon is older than the command demands",
    "timeout": "it did not happen in time",
    "elsewhere": "the queue belongs to another machine",
    "unavailable": "something on the machine prevents it",
    "internal": "a bug in gpuyard",
}


class GpuyardError(Exception):
    """Root of the tree. `message` says what failed and for which thing; `hint` says what to try next, and is a note of
    the exception, so that a traceback ends with it; `code` is one of CODES."""

    code = "internal"

    def __init__(self, message: str, *, hint: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            self.add_note(hint)
        if code is not None:
            self.code = code

    @property
    def with_hint(self) -> str:
        """The message and the hint in one line."""
        return f"{self} ({self.hint})" if self.hint else str(self)

    def __reduce__(self) -> "tuple[Any, ...]":
        """Copy and pickle without `__init__`, whose parameters differ from class to class."""
        import copyreg

        return copyreg.__newobj__, (type(self),), {**vars(self), "args": self.args}  # type: ignore[attr-defined]


class UserError(GpuyardError):
    """A request that cannot be understood or carried out."""

    code = "usage"


class EnvironmentFault(GpuyardError):
    """Something on this machine prevents the action."""

    code = "unavailable"


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

    code = "timeout"


class LedgerBusy(EnvironmentFault):
    """Another process changes the ledger at this moment. The queue goes on as soon as it can."""


class StoreFault(EnvironmentFault):
    """The queue's database is damaged, or cannot be written because the disk is full."""

    def __init__(self, message: str, *, hint: str | None = None, is_damage: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.is_damage = is_damage


class UnreadableRow(StoreFault):
    """A row of the queue's database cannot be read. The message has nothing of the row, which may be an environment."""


class ProbeError(EnvironmentFault):
    """A probe could not read its devices. `source` names the tool or library."""

    kind = "failed"

    def __init__(self, source: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.source = source

    def __str__(self) -> str:
        return f"{self.source}: {self.message}"


class ProbeMissing(ProbeError):
    kind = "missing"  # the tool or library is not installed


class ProbeDenied(ProbeError):
    kind = "denied"  # it is installed, but this user may not use it


class ProbeTimeout(ProbeError):
    kind = "timeout"  # it did not answer in time


class ProbeCrashed(ProbeError):
    kind = "crashed"  # it exited with an error


class ProbeGarbled(ProbeError):
    kind = "garbled"  # its output cannot be parsed
