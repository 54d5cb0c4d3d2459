"""A task: a job of a workspace, with the settings that other jobs do not have.

A task shows its output in a tmux session, writes its logs into the workspace's folder, and creates a marker file when
it is done. The engine that starts the task takes care of all three.
"""

from collections.abc import Sequence

from msgspec import Struct

GPU = "{gpu}"


class Task(Struct, frozen=True, kw_only=True):
    """Settings of a task. All paths are absolute.

    - `session`: tmux session name with the placeholder {gpu}; None for no session. `owner` marks the session as ours.
    - `record`: file in which the engine records how the task ended.
    - `log`: output of the program. `other_log` replaces it if another workspace that shares the folder uses `log`.
    - `scheduler_log`: log of what the scheduler does with the task.
    - `variable`: environment variable that names the devices, in place of CUDA_VISIBLE_DEVICES.
    - `check_s`: interval at which the engine checks for the marker; it ends a program that still runs `grace_s` after
      its marker appeared.
    - `delay_s`: delay between opening the session and starting the program.
    - `hook`: command that runs before and after the program, for at most `hook_timeout_s`.
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


def place_of(labels: Sequence[str | None]) -> str:
    """Return where a task on these GPUs runs, as its session name shows it: `gpu0_1`, `gpu-amd-0` for amd:0, or `cpu`
    without a GPU. tmux takes no colon in a session's name."""
    if not labels:
        return "cpu"
    places = "_".join((label or "x").replace(":", "-") for label in labels)
    return f"gpu{places}" if places[0] in "x0123456789" else f"gpu-{places}"


def session_on(task: Task, place: str) -> str | None:
    """Return the session name of a task that runs at `place`, or None."""
    return None if task.session is None else task.session.replace(GPU, place)
