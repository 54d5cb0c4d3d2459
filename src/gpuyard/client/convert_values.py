"""What scripts give and get: ids of jobs, submissions, and the daemon's answers as the structures of `schema`."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from gpuyard.client.restart_daemon import advice
from gpuyard.client.submitted_code import command_words, submission_facts
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.schema.jobs import LogEvent

Ids: TypeAlias = int | str | Iterable[int | str]


def join_ids(ids: Ids | None) -> str | None:
    """Return ids as one text, None for None. An empty list is an error: it must not mean all jobs."""
    text = None if ids is None else id_text(ids)
    if text is not None and not text.strip():
        raise UserError("no job is given", hint="leave the ids out for all jobs")
    return text


def id_text(ids: Ids | Iterable[Ids]) -> str:
    if isinstance(ids, int | str):
        return str(ids)
    return " ".join(map(id_text, ids))


# Words, or a single list of words.
Command: TypeAlias = Sequence[str | Sequence[str]]


class SubmissionSource(NamedTuple):
    """What is submitted, as in `Client.submit`."""

    command: Command
    cwd: str | os.PathLike[str] | None
    environment: Mapping[str, str] | None
    commands: Iterable[str] | None
    table: str | None
    snapshot: bool | None = None  # None: as `[submit]` says


def submission_body(source: SubmissionSource, options: dict[str, Any], *, is_local: bool) -> dict[str, Any]:
    """Return what is sent. `is_local`: to this user's own daemon, with what a command that is typed in a shell takes
    from there."""
    given, cwd, environment, commands, table, snapshot = source
    command = program_arguments(given, os.path.abspath(cwd or ".") if is_local else None)
    lines = None if commands is None else "\n".join(commands)
    body: dict[str, Any] = {"list": lines, "table": table, "options": options}
    if is_local:
        body |= submission_facts(command, os.path.abspath(cwd or "."), wants_snapshot=snapshot, with_own=True)
        if options.get("stdin") is not None:
            options["stdin"] = os.path.abspath(options["stdin"])
        if options.get("mount"):
            mounts = [options["mount"]] if isinstance(options["mount"], str) else options["mount"]
            options["mount"] = [mount if mount.startswith("~") else os.path.abspath(mount) for mount in mounts]
    else:
        body |= {"token": os.urandom(16).hex(), "command": command or None}
        body |= {} if cwd is None else {"cwd": os.fspath(cwd)}
    if environment is not None:
        body["environment"] = dict(environment)
    return body


def program_arguments(command: Command, directory: str | None) -> list[str]:
    """Return the arguments of the program: one list of them as it is, as `subprocess` takes it, or what `command_words`
    makes of them."""
    is_list = len(command) == 1 and not isinstance(command[0], str)
    words = command[0] if is_list else command
    texts = [word for word in words if isinstance(word, str)]
    if len(texts) < len(words):
        other = next(word for word in words if not isinstance(word, str))
        raise UserError(
            f"the command has {other!r} in it", hint='give text: submit("python", "train.py", "--lr", "0.1")'
        )
    return texts if is_list else command_words(texts, directory)


def option_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options as the daemon names them."""
    # Not `in (None, False)`: zero equals False, and `gpus=0` must be sent.
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    return {
        name.replace("_", "-"): list(map(str, value)) if isinstance(value, list | tuple) else value
        for name, value in given.items()
    }


T = TypeVar("T")


def convert(answer: Any, kind: type[T]) -> T:
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:  # a daemon of another version
        hint = advice(getattr(answer, "version", None))
        raise EnvironmentFault(f"the daemon's answer cannot be read: {error}", hint=hint) from error


def log_texts(events: Iterator[dict[str, Any]]) -> Iterator[str]:
    for each in events:
        event = convert(each, LogEvent)
        if event.error is not None:
            raise EnvironmentFault(event.error, hint=event.hint)
        if event.over:
            return
        if event.text is not None:
            yield event.text
    raise EnvironmentFault("the daemon ended before the job did", hint="the job keeps running: follow its log again")
