"""The code of a job, in its details."""

from msgspec import Struct


class JobCode(Struct, frozen=True, kw_only=True):
    """What was recorded of the code when the job was submitted, and what became of it.

    `dirty`: the work tree had changes that were not committed. `script_changed`: the script is another one now.
    `changed_attempts`: those that started with another script than was submitted. `snapshot` is the folder that the
    job runs in, and `snapshot_exists` whether it is still there. None: there is none, or it is not known."""

    root: str | None
    commit: str | None
    dirty: bool | None
    script: str | None
    digest: str | None
    script_changed: bool | None
    changed_attempts: tuple[int, ...]
    snapshot: str | None
    snapshot_exists: bool | None
    text: str | None
