"""`gpuyard.Client`: the queue for scripts, with the verbs of the command line.

Answers are what the daemon says, as plain dicts; `docs/reference/json.md` has their keys. Errors are raised:
`UserError` for what cannot be understood or done, `EnvironmentFault` where the machine stands in the way.
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Self, TypeAlias, overload

from gpuyard.connect.config_digest import digest_of
from gpuyard.connect.transports import Answer, SocketTransport, Transport, WaitingTransport, WebTransport
from gpuyard.core.units import parse_duration
from gpuyard.errors import EnvironmentFault, UserError

Ids: TypeAlias = int | str | Iterable[int | str]
# By a state, a tag, a user, or what is searched for.
Where: TypeAlias = Mapping[str, str]

# So much of a log is told at once at most.
_LONGEST_TAIL = 4 * 1024 * 1024
_LONGEST_ASK_S = 25.0
_LOOK_AGAIN_S = 0.5


class Client:
    """`with Client() as yard:` speaks to your own daemon, and starts it where none runs. With the `url` that `gpuyard
    web` prints it is asked over the page's port, from here or through a forwarded one."""

    def __init__(self, url: str | None = None, *, token: str | None = None, start: bool = True) -> None:
        self._way: Transport = SocketTransport(may_start=start) if url is None else WebTransport(url, token)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._way.close()

    # Submit

    def submit(
        self,
        *command: str,
        cwd: str | os.PathLike[str] | None = None,
        environment: Mapping[str, str] | None = None,
        commands: Iterable[str] | None = None,
        table: str | None = None,
        **options: Any,
    ) -> Answer:
        """Options are those of `gpuyard submit`, with underscores: `vram="8G"`, `time_limit="4h"`, `hold=True`,
        `sweep=["lr=1e-3,1e-4"]`. `commands` are many, each a line; `table` is the text of a CSV file whose columns fill
        in the command's {NAMES}. The job gets this process's folder and variables, unless told otherwise; over the
        page's port, the home and the daemon's."""
        body: dict[str, Any] = {
            "token": os.urandom(16).hex(),
            "command": list(command) or None,
            "list": None if commands is None else "\n".join(commands),
            "table": table,
            "options": _typed(options),
        }
        if self._way.is_near:
            body |= _from_here(command, options, cwd)
        elif cwd is not None:
            body["cwd"] = os.fspath(cwd)
        if environment is not None:
            body["environment"] = dict(environment)
        return self._way.request("POST", "/submissions", body=body)

    def resubmit(self, job: int | str, *command: str, **options: Any) -> Answer:
        """A new job like that one, with another command or other options."""
        body: dict[str, Any] = {"options": _typed(options)} | ({"command": list(command)} if command else {})
        return self._way.request("POST", f"/jobs/{self._one(job)}/resubmit", body=body)

    # Ask

    def queue(self, ids: Ids | None = None, *, all: bool = False, **query: Any) -> Answer:  # noqa: A002
        """Jobs, a page of them: `state`, `search`, `tag` and `user` say which, `order="newest"`, `limit` and `after`
        (the last page's `next`) how many and from where."""
        asked = {"ids": _chosen(ids), "all": "1" if all else None, **query}
        return self._way.request("GET", "/jobs", _query(asked))

    def show(self, job: int | str, *, environment: bool = False) -> Answer:
        query = {"environment": "1"} if environment else None
        return self._way.request("GET", f"/jobs/{self._one(job)}", query)

    def why(self, job: int | str) -> Answer:
        return self._way.request("GET", f"/jobs/{self._one(job)}/why")

    def history(self, job: int | str) -> Answer:
        return self._way.request("GET", f"/jobs/{self._one(job)}/history")

    @overload
    def logs(self, job: int | str, *, attempt: int | None = None, follow: Literal[False] = False) -> str: ...

    @overload
    def logs(self, job: int | str, *, attempt: int | None = None, follow: Literal[True]) -> Iterator[str]: ...

    def logs(self, job: int | str, *, attempt: int | None = None, follow: bool = False) -> str | Iterator[str]:
        """What its last attempt wrote, or this one: the last 4 MB, and the file that `show` names has all that is kept.
        With `follow` piece by piece as it is written, from one attempt to the next, until the job is over."""
        path, query = f"/jobs/{self._one(job)}/log", _query({"attempt": attempt, "tail": _LONGEST_TAIL})
        if follow:
            return _texts(self._way.events(f"{path}/live", query))
        return str(self._way.request("GET", path, query)["text"])

    def wait(self, ids: Ids | None = None, *, timeout: float | str | None = None) -> Answer:
        """Until these jobs, or all that are in the queue now, have finished; `done` says whether they have in time.
        `failed_count` is how many did not succeed."""
        deadline = float("inf") if timeout is None else time.monotonic() + _seconds(timeout)
        # The first answer names the jobs that are meant, so that later ones are not "everything unfinished" anew.
        with self._way.patient() as patient:
            answer = _wait(patient, _chosen(ids) or "", 0.0)
            while not answer["done"] and (left := deadline - time.monotonic()) > 0:
                answer = _wait(patient, answer["selection"], min(_LONGEST_ASK_S, left))
        return answer

    # Change

    def cancel(self, *ids: Ids, where: Where | None = None) -> Answer:
        """Each of these verbs takes ids (`17`, `"17-20"`, `"tag=night"`, lists of them), or `where`, for all jobs that
        are so: `where={"state": "queued", "search": "lr"}`."""
        return self._change("cancel", ids, where)

    def hold(self, *ids: Ids, where: Where | None = None) -> Answer:
        return self._change("hold", ids, where)

    def release(self, *ids: Ids, where: Where | None = None) -> Answer:
        return self._change("release", ids, where)

    def retry(self, *ids: Ids, where: Where | None = None) -> Answer:
        return self._change("retry", ids, where)

    def suspend(self, *ids: Ids, where: Where | None = None) -> Answer:
        return self._change("suspend", ids, where)

    def resume(self, *ids: Ids, where: Where | None = None) -> Answer:
        return self._change("resume", ids, where)

    def priority(self, *ids: Ids, to: int, where: Where | None = None) -> Answer:
        return self._change("priority", ids, where, priority=to)

    def _change(self, verb: str, ids: tuple[Ids, ...], where: Where | None, **more: int) -> Answer:
        if bool(ids) == (where is not None):
            raise UserError(f"which jobs should `{verb}` change?", hint='name their ids, or where={"state": "queued"}')
        chosen = {"ids": _named(ids)} if where is None else {"where": dict(where)}
        return self._way.request("POST", f"/jobs/{verb}", body={**chosen, **more})

    # The queue as a whole

    def status(self) -> Answer:
        return self._way.request("GET", "/status")

    def pause(self) -> Answer:
        return self._brake("pause")

    def unpause(self) -> Answer:
        return self._brake("unpause")

    def drain(self, *, wait: bool = False) -> Answer:
        """With `wait`, it returns when nothing runs any more."""
        answer = self._brake("drain")
        while wait and answer["running"]:
            time.sleep(_LOOK_AGAIN_S)
            answer["running"] = self.status()["under_way"]
        return answer

    def _brake(self, verb: str) -> Answer:
        return self._way.request("POST", f"/{verb}", body={})

    def clean(self, older_than: float | str) -> Answer:
        """Forgets jobs that finished longer ago than this, such as `"30d"`, and their logs."""
        body = {"older_than_s": _seconds(older_than)}
        return self._way.request("POST", "/clean", body=body)

    def estimates(self, limit: int = 50) -> Answer:
        return self._way.request("GET", "/estimates", {"limit": str(limit)})

    def forget_estimates(self, *words: str, all: bool = False) -> Answer:  # noqa: A002 - as it is typed
        """By their fingerprints, or by a part of the command; or `all=True`."""
        body = {"all": True} if all and not words else {"words": list(words), "all": all}
        return self._way.request("POST", "/estimates/forget", body=body)

    def stop(self) -> Answer:
        """Ends the daemon; jobs go on, and the next one takes them over."""
        return self._way.stop()

    # The machine

    def devices(self) -> Answer:
        return self._way.request("GET", "/devices")

    def device_history(self, span: str = "10m") -> Answer:
        return self._way.request("GET", "/devices/history", {"span": span})

    def timeline(self, span: str = "1h", until: float | None = None) -> Answer:
        return self._way.request("GET", "/timeline", _query({"span": span, "until": until}))

    def report(self, since: str = "7d", by: Literal["user", "workspace", "name"] = "user") -> Answer:
        return self._way.request("GET", "/report", {"since": since, "by": by})

    def _one(self, job: int | str) -> int:
        """The one that is meant."""
        if isinstance(job, int) or (job.isascii() and job.isdecimal()):
            return int(job)
        found = [each["id"] for each in self.queue(job, limit=2)["jobs"]]
        if len(found) != 1:
            raise UserError(f"'{job}' means {'several jobs' if found else 'no job'}", hint="name one by its id")
        return int(found[0])


def _from_here(command: tuple[str, ...], options: Mapping[str, Any], cwd: str | os.PathLike[str] | None) -> Answer:
    """What a command that is typed here takes from its shell."""
    folder, stdin = os.path.abspath(cwd or "."), options.get("stdin")
    return {
        "cwd": folder,
        "configuration": digest_of(list(command), folder),
        "environment": dict(os.environ),
        "options": _typed(options if stdin is None else {**options, "stdin": os.path.abspath(stdin)}),
    }


def _wait(patient: WaitingTransport, selection: str, within_s: float) -> Answer:
    return patient.get("/wait", {"ids": selection, "timeout": f"{within_s:.3f}"}, within_s)


def _texts(events: Iterator[dict[str, Any]]) -> Iterator[str]:
    for event in events:
        if "error" in event:
            raise EnvironmentFault(event["error"], hint=event["hint"])
        if "over" in event:
            return
        if "text" in event:
            yield event["text"]
    raise EnvironmentFault("the daemon ended before the job did", hint="the job goes on: ask again")


def _chosen(ids: Ids | None) -> str | None:
    """None of them is not all of them."""
    named = None if ids is None else _named(ids)
    if named is not None and not named.strip():
        raise UserError("no job is named", hint="leave the ids out to mean all")
    return named


def _named(ids: Ids | Iterable[Ids]) -> str:
    if isinstance(ids, int | str):
        return str(ids)
    return " ".join(map(_named, ids))


def _typed(options: Mapping[str, Any]) -> dict[str, Any]:
    """As they are on the command line."""
    # Not `in (None, False)`: zero equals False, and no GPU is not one GPU.
    told = {name: value for name, value in options.items() if value is not None and value is not False}
    return {name.replace("_", "-"): _value(value) for name, value in told.items()}


def _value(value: Any) -> Any:
    return list(map(str, value)) if isinstance(value, list | tuple) else value


def _query(asked: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in asked.items() if value is not None}


def _seconds(told: float | str) -> float:
    return parse_duration(told) if isinstance(told, str) else float(told)
