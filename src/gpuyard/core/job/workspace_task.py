"""A task: a job of a workspace, with what it has beyond any other job.

It is seen in a session of tmux's, has logs where its workspace keeps them, and says by a marker that it is done. The
engine that starts it keeps these promises.
"""

from collections.abc import Sequence

from msgspec import Struct

GPU = "{gpu}"


class Task(Struct, frozen=True, kw_only=True):
    """All paths are absolute. `session` is a name with GPU in it, `None` for a task without one; `owner` marks the
    session as this task's. Its end is told in `record`. `log` has what it writes; in a folder that workspaces share,
    `other_log` has it where `log` is another one's. `scheduler_log` has what becomes of the task. `variable` names its
    devices in place of CUDA_VISIBLE_DEVICES. The marker is looked for every `check_s`; a program that goes on for
    `grace_s` after its marker was seen is ended. `delay_s` pass between its session and its start. `hook` is a
    command that is run before and after it, and ended after `hook_timeout_s`.
    """

    workspace: str
    config: str
    owner: str
    marker: str
    record: str
    session: str | None = None
    closes_session: bool = False
    log: str | None = None
    other_log: str | None = None
    scheduler_log: str | None = None
    variable: str | None = None
    check_s: float = 30.0
    delay_s: float = 0.5
    grace_s: float = 60.0
    hook: tuple[str, ...] = ()
    hook_timeout_s: float = 60.0


def place_of(indexes: Sequence[int | None]) -> str:
    """Where it runs, as its session calls it."""
    return f"gpu{'_'.join('x' if index is None else str(index) for index in indexes)}" if indexes else "cpu"


def session_on(task: Task, place: str) -> str | None:
    return None if task.session is None else task.session.replace(GPU, place)
