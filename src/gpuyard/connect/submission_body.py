"""The body of a submission from a script."""

import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from gpuyard.connect.submitted_code import digest_of, framework_of, record_code
from gpuyard.system.submitting_shell import read_shell_settings, starting_processes


class SubmissionSource(NamedTuple):
    """What is submitted, as in `Client.submit`."""

    command: tuple[str, ...]
    cwd: str | os.PathLike[str] | None
    environment: Mapping[str, str] | None
    commands: Iterable[str] | None
    table: str | None
    snapshot: bool | None = None  # None: as `[submit]` says


def submission_body(source: SubmissionSource, options: dict[str, Any], *, is_local: bool) -> dict[str, Any]:
    """Return what is sent. `is_local`: to this user's own daemon, with what a command that is typed in a shell takes
    from there."""
    command, cwd, environment, commands, table, snapshot = source
    body: dict[str, Any] = {
        "token": os.urandom(16).hex(),
        "command": list(command) or None,
        "list": None if commands is None else "\n".join(commands),
        "table": table,
        "options": options,
    }
    if is_local:
        directory, code = record_code(command, os.path.abspath(cwd or "."), wants_snapshot=snapshot)
        body |= {"cwd": directory, "environment": dict(os.environ), "shell": read_shell_settings()}
        body["code"] = code
        body["submitters"] = starting_processes(with_own=True)
        body["configuration"] = digest_of(list(command), directory)
        body["framework"] = framework_of(list(command), directory)
        if options.get("stdin") is not None:
            options["stdin"] = os.path.abspath(options["stdin"])
        if options.get("mount"):
            mounts = [options["mount"]] if isinstance(options["mount"], str) else options["mount"]
            options["mount"] = [mount if mount.startswith("~") else os.path.abspath(mount) for mount in mounts]
    elif cwd is not None:
        body["cwd"] = os.fspath(cwd)
    if environment is not None:
        body["environment"] = dict(environment)
    return body


def option_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options as the daemon names them."""
    # Not `in (None, False)`: zero equals False, and `gpus=0` must be sent.
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    return {
        name.replace("_", "-"): list(map(str, value)) if isinstance(value, list | tuple) else value
        for name, value in given.items()
    }
