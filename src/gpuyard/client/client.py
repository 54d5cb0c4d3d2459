"""`gpuyard.Client`: the queue for scripts, with the verbs of the command line.

Answers are Structs of `gpuyard.schema`; `docs/reference/json.md` explains their fields. Errors are raised: `UserError`
for a mistake in the request, `EnvironmentFault` for a problem on the machine, each with a `message` and a `hint`.
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, Unpack, overload

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpuyard.client.fast_http import Closeable
from gpuyard.client.restart_daemon import advice
from gpuyard.client.submitted_code import RemovedIfRefused, command_words, submission_facts
from gpuyard.client.supply_secrets import merge, second_request
from gpuyard.client.transports import SocketTransport, WebTransport
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.units import parse_duration
from gpuyard.schema import jobs, machine
from gpuyard.schema import queue as answers
from gpuyard.schema.requests import JobOrder, SubmitKwargs
from gpuyard.system.submitting_shell import starting_processes

Ids: TypeAlias = int | str | Iterable[int | str]
Command: TypeAlias = Sequence[str | Sequence[str]]  # words, or a single list of words
Where: TypeAlias = Mapping[str, str]  # which jobs: by `state`, `search`, `tag` or `user`
T = TypeVar("T", bound=Struct)


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
    return {
        name.replace("_", "-"): list(map(str, value)) if isinstance(value, list | tuple) else value
        for name, value in options.items()
        if value is not None and value is not False  # zero equals False, and `gpus=0` must be sent
    }


def convert(answer: Any, kind: type[T]) -> T:
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:  # a daemon of another version
        hint = advice(getattr(answer, "version", None))
        raise EnvironmentFault(f"the daemon's answer cannot be read: {error}", hint=hint) from error


def log_texts(events: Iterator[dict[str, Any]]) -> Iterator[str]:
    for each in events:
        event = convert(each, jobs.LogEvent)
        if event.error is not None:
            raise EnvironmentFault(event.error, hint=event.hint)
        if event.over:
            return
        if event.text is not None:
            yield event.text
    raise EnvironmentFault("the daemon ended before the job did", hint="the job keeps running: follow its log again")


class Client(Closeable):
    """`with Client() as client:` talks to your own daemon, and starts it if none runs.

    With the `url` that `gpuyard web` prints, it uses the web page's port, on this machine or forwarded from another.
    """

    def __init__(self, url: str | None = None, *, token: str | None = None, start: bool = True) -> None:
        self._transport = SocketTransport(may_start=start) if url is None else WebTransport(url, token)

    def close(self) -> None:
        self._transport.close()

    def submit(
        self,
        *command: str | Sequence[str],
        cwd: str | os.PathLike[str] | None = None,
        environment: Mapping[str, str] | None = None,
        commands: Iterable[str] | None = None,
        table: str | None = None,
        snapshot: bool | None = None,
        **options: Unpack[SubmitKwargs],
    ) -> answers.SubmitResult:
        """Submit a command, or several: `submit("python", "train.py")`, `submit(["python", "train.py"])`, or a line as
        typed in a shell, `submit("make && python train.py")`.

        Options are those of `gpuyard submit`, with underscores: `vram="8G"`, `time_limit="4h"`, `hold=True`,
        `sweep=["lr=1e-3,1e-4"]`. `commands` are command lines; `table` is the text of a CSV file whose columns fill in
        the command's {NAMES}. Default of `cwd` and `environment`: those of this process, whose umask, niceness and
        soft limits the job gets, too; over the page's port, your home and what the daemon has. With `snapshot` the jobs
        run the code as it is now; default: as `[submit]` says.
        """
        body = self._body(command, cwd, commands, table, options, snapshot=snapshot)
        if environment is not None:
            body["environment"] = dict(environment)
        with RemovedIfRefused(body.get("code", {})):
            return self._post("/submissions", body, answers.SubmitResult)

    def preview(
        self,
        *command: str | Sequence[str],
        cwd: str | os.PathLike[str] | None = None,
        commands: Iterable[str] | None = None,
        table: str | None = None,
        **options: Unpack[SubmitKwargs],
    ) -> answers.SubmissionPreview:
        """Check a submission, as `gpuyard submit --dry-run` does, and return what it would submit."""
        body = self._body(command, cwd, commands, table, options, snapshot=False)
        return self._post("/submissions/preview", body, answers.SubmissionPreview)

    def _body(  # noqa: PLR0913 - what `submit` takes
        self, command: Command, cwd: str | os.PathLike[str] | None, commands: Iterable[str] | None, table: str | None,
        kwargs: SubmitKwargs, *, snapshot: bool | None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return what is sent; to the own daemon with what a command that is typed in a shell takes from there."""
        options = option_values(kwargs)
        lines = None if commands is None else "\n".join(commands)
        body: dict[str, Any] = {"list": lines, "table": table, "options": options}
        if not self._transport.is_local:
            where = {} if cwd is None else {"cwd": os.fspath(cwd)}
            return {**body, "token": os.urandom(16).hex(), "command": program_arguments(command, None) or None, **where}
        if options.get("stdin") is not None:
            options["stdin"] = os.path.abspath(options["stdin"])
        if options.get("mount"):
            mounts = [options["mount"]] if isinstance(options["mount"], str) else options["mount"]
            options["mount"] = [mount if mount.startswith("~") else os.path.abspath(mount) for mount in mounts]
        folder = os.path.abspath(cwd or ".")
        arguments = program_arguments(command, folder)
        return body | submission_facts(arguments, folder, wants_snapshot=snapshot, with_own=True)

    def resubmit(
        self, job: int | str, *command: str | Sequence[str], **options: Unpack[SubmitKwargs]
    ) -> answers.SubmitResult:
        """Submit a job like this one, with another command or other options."""
        body = {"options": option_values(options), **({"command": program_arguments(command, None)} if command else {})}
        return self._post(f"/jobs/{self._find_id(job)}/resubmit", body, answers.SubmitResult)

    def edit(self, *ids: Ids, where: Where | None = None, **options: Unpack[SubmitKwargs]) -> answers.ChangeSummary:
        """Change these options of waiting jobs."""
        return self._change("edit", ids, where, options=option_values(options))

    def queue(  # noqa: PLR0913 - the parameters of the query
        self,
        ids: Ids | None = None,
        *,
        all: bool = False,  # noqa: A002 - as on the command line
        state: str | None = None,
        search: str | None = None,
        tag: str | None = None,
        user: str | None = None,
        order: JobOrder | None = None,
        limit: int | None = None,
        after: int | None = None,
        fold: bool = False,
    ) -> jobs.JobPage:
        """Return a page of jobs; `after` is the `next` of the page before. With `fold`, each sweep and array is one
        row."""
        query = {
            "ids": join_ids(ids), "all": "1" if all else None, "state": state, "search": search, "tag": tag,
            "user": user, "order": order, "limit": limit, "after": after, "fold": "1" if fold else None,
        }  # fmt: skip
        return self._get("/jobs", jobs.JobPage, query)

    def sweep(
        self,
        job: int | str,
        *,
        sort: str | None = None,
        state: str | None = None,
        limit: int | None = None,
        after: int | None = None,
    ) -> jobs.SweepPage:
        """Return a page of the runs of the sweep or array that a job belongs to; `sort="-lr"` sorts by a column, from
        the last to the first."""
        query = {"sort": sort, "state": state, "limit": limit, "after": after}
        return self._get(f"/sweeps/{self._find_id(job)}", jobs.SweepPage, query)

    def show(self, job: int | str, *, environment: bool = False) -> jobs.JobDetails:
        """Return all details of a job; with `environment`, the values of its variables, which may be secrets."""
        return self._get(f"/jobs/{self._find_id(job)}", jobs.JobDetails, {"environment": "1" if environment else None})

    def why(self, job: int | str) -> jobs.WaitExplanation:
        """Return why a job does not start, or how it ended."""
        return self._get(f"/jobs/{self._find_id(job)}/why", jobs.WaitExplanation)

    def history(self, job: int | str) -> jobs.JobHistory:
        """Return everything that happened to a job."""
        return self._get(f"/jobs/{self._find_id(job)}/history", jobs.JobHistory)

    @overload
    def logs(
        self, job: int | str, *, attempt: int | None = None, follow: Literal[False] = False, stderr: bool = False
    ) -> str: ...

    @overload
    def logs(
        self, job: int | str, *, attempt: int | None = None, follow: Literal[True], stderr: bool = False
    ) -> Iterator[str]: ...

    def logs(
        self, job: int | str, *, attempt: int | None = None, follow: bool = False, stderr: bool = False
    ) -> str | Iterator[str]:
        """Return the last 4 MB of the log of its last attempt, or of this one; `show(job).log` is the file.

        With `follow`, yield text as it is written, from one attempt to the next, until the job has finished. With
        `stderr`, its standard error, of a job that was submitted with `split_stderr` or `error`.
        """
        stream = "stderr" if stderr else None
        path = f"/jobs/{self._find_id(job)}/log"
        query = _texts({"attempt": attempt, "tail": 4 << 20, "stream": stream})
        if follow:
            return log_texts(self._transport.events(f"{path}/live", query))
        return self._get(path, jobs.LogTail, query).text

    def wait(self, ids: Ids | None = None, *, timeout: float | str | None = None) -> answers.WaitResult:
        """Wait until these jobs have finished; by default those that this process, or the shell that started it, has
        submitted since it last waited; if there are none at all, all that are unfinished now. `done` is False after a
        timeout, and if all that are left are held or wait for held jobs (`is_stuck`)."""
        submitters = starting_processes(with_own=True) if self._transport.is_local else []
        deadline = float("inf") if timeout is None else time.monotonic() + _seconds(timeout)
        # The first answer names the jobs: jobs that are submitted later are not waited for.
        with self._transport.waiting() as connection:

            def ask(selection: str, within_s: float) -> answers.WaitResult:
                query = {"ids": selection, "timeout": f"{within_s:.3f}", "stuck": "1"}
                query |= {} if selection else {"submitters": " ".join(submitters)}
                return convert(connection.get("/wait", query, within_s), answers.WaitResult)

            result = first = ask(join_ids(ids) or "", 0.0)
            while not (result.done or result.is_stuck) and (left := deadline - time.monotonic()) > 0:
                result = ask(result.selection, min(25.0, left))
        if result.done and result.selection and submitters:
            body = {"ids": result.selection, "submitters": submitters, "own": first.chosen_by == "shell"}
            self._post("/wait/reported", body, answers.ReportedResult)
        return replace(result, chosen_by=first.chosen_by)

    # Change. Each method takes ids (`17`, `"17-20"`, `"tag=night"`, lists of them), or `where`, for all matching jobs:
    # `where={"state": "queued", "search": "lr"}`.

    def cancel(self, *ids: Ids, where: Where | None = None) -> answers.ChangeSummary:
        """Stop jobs, or remove them from the queue."""
        return self._change("cancel", ids, where)

    def hold(self, *ids: Ids, where: Where | None = None) -> answers.ChangeSummary:
        """Keep jobs from starting."""
        return self._change("hold", ids, where)

    def release(self, *ids: Ids, where: Where | None = None, allow_missing: bool = False) -> answers.ChangeSummary:
        """Let held jobs start. `allow_missing`: as for `retry`."""
        return self._run_again("release", ids, where, allow_missing=allow_missing)

    def retry(
        self,
        *ids: Ids,
        where: Where | None = None,
        only: bool = False,
        allow_missing: bool = False,
        all: bool = False,  # noqa: A002 - as on the command line
    ) -> answers.ChangeSummary:
        """Run finished jobs again, and let the jobs wait again that were skipped because of them; not with `only`.

        Jobs that are named one by one run again in any case; of a range, a tag or any other selection without a state
        only those that failed or were rejected, unless `all` is true.

        Values of secret variables, which are dropped when a job has ended, are taken from this process; with
        `allow_missing` jobs run without those that it lacks.
        """
        return self._run_again("retry", ids, where, allow_missing=allow_missing, only=only, all=all)

    def _run_again(
        self, verb: str, ids: tuple[Ids, ...], where: Where | None, *, allow_missing: bool, **more: bool
    ) -> answers.ChangeSummary:
        first = self._change(verb, ids, where, **more)
        second = second_request(verb, msgspec.to_builtins(first), allow_missing=allow_missing)
        if second is None:
            return first
        answer = self._transport.request("POST", f"/jobs/{verb}", body={**more, **second})
        return convert(merge(msgspec.to_builtins(first), answer), answers.ChangeSummary)

    def suspend(self, *ids: Ids, where: Where | None = None) -> answers.ChangeSummary:
        """Move the GPU memory of running jobs to RAM, and pause them."""
        return self._change("suspend", ids, where)

    def resume(self, *ids: Ids, where: Where | None = None) -> answers.ChangeSummary:
        """Continue suspended jobs."""
        return self._change("resume", ids, where)

    def priority(self, *ids: Ids, to: int, where: Where | None = None) -> answers.ChangeSummary:
        """Set the priority: higher starts earlier."""
        return self._change("priority", ids, where, priority=to)

    def _change(self, verb: str, ids: tuple[Ids, ...], where: Where | None, **more: object) -> answers.ChangeSummary:
        if bool(ids) == (where is not None):
            raise UserError(f"which jobs should `{verb}` change?", hint='name their ids, or where={"state": "queued"}')
        chosen = {"ids": id_text(ids)} if where is None else {"where": dict(where)}
        return self._post(f"/jobs/{verb}", {**chosen, **more}, answers.ChangeSummary)

    def status(self) -> answers.DaemonStatus:
        return self._get("/status", answers.DaemonStatus)

    def pause(self) -> answers.PauseResult:
        """Start no more jobs."""
        return self._post("/pause", {}, answers.PauseResult)

    def unpause(self) -> answers.PauseResult:
        """Start jobs again after `pause` or `drain`."""
        return self._post("/unpause", {}, answers.PauseResult)

    def drain(self, *, wait: bool = False) -> answers.PauseResult:
        """Start no more jobs; with `wait`, return when no job runs any more."""
        result = self._post("/drain", {}, answers.PauseResult)
        while wait and (result.running or result.counts.get("pending")):
            time.sleep(0.5)
            status = self.status()
            result = replace(result, running=status.under_way, counts=status.counts)
        return result

    def clean(self, older_than: float | str | None = None) -> answers.CleanResult:
        """Remove jobs that finished longer ago than this, such as `"30d"`, or than `[keep]` says; and logs beyond its
        limits."""
        return self._post(
            "/clean", {} if older_than is None else {"older_than_s": _seconds(older_than)}, answers.CleanResult
        )

    def estimates(self, limit: int = 50) -> answers.EstimateList:
        """Return estimates learned from past runs, the latest first."""
        return self._get("/estimates", answers.EstimateList, {"limit": limit})

    def forget_estimates(self, *words: str, all: bool = False) -> answers.ForgetResult:  # noqa: A002 - as on the command line
        """Forget estimates, by their fingerprints or by a part of the command; or `all=True`."""
        return self._post("/estimates/forget", {"words": list(words), "all": all}, answers.ForgetResult)

    def export_estimates(self) -> list[answers.LearnedProfile]:
        """Return all estimates, to import them on another machine."""
        found, after = [], None
        while True:
            page = self._get("/estimates/export", answers.ProfilePage, {"after": after})
            found += page.estimates
            if (after := page.next) is None:
                return found

    def import_estimates(
        self, estimates: Iterable[answers.LearnedProfile], *, overwrite: bool = False
    ) -> answers.ImportResult:
        """Add estimates of another machine. Those that were learned here stay; not with `overwrite`."""
        left, imported, kept = list(estimates), 0, 0
        while left:
            piece, left = left[:500], left[500:]
            body = {"estimates": msgspec.to_builtins(piece), "replace": overwrite}
            result = self._post("/estimates/import", body, answers.ImportResult)
            imported, kept = imported + result.imported, kept + result.kept
        return answers.ImportResult(imported=imported, kept=kept)

    def stop(self) -> answers.StopResult:
        """Stop the daemon, and return when it has ended. Jobs keep running; the next daemon takes them over."""
        return convert(self._transport.stop(), answers.StopResult)

    def devices(self) -> machine.MachineState:
        """Return the devices, who uses their memory, and the host."""
        return self._get("/devices", machine.MachineState)

    def drain_devices(self, *devices: str | int, reason: str = "") -> machine.DrainResult:
        """Start nothing new on these devices, in the queue and in scripts; what runs there continues."""
        return self._post("/devices/drain", {"devices": devices, "reason": reason}, machine.DrainResult)

    def undrain_devices(self, *devices: str | int) -> machine.DrainResult:
        """Let work start on these devices again."""
        return self._post("/devices/undrain", {"devices": devices}, machine.DrainResult)

    def clear_devices(self, *devices: str | int) -> machine.ClearResult:
        """Let work start on devices that were faulty, after a repair."""
        return self._post("/devices/clear", {"devices": devices}, machine.ClearResult)

    def device_history(self, span: Literal["10m", "1h", "24h"] = "10m") -> machine.DeviceHistory:
        """Return the usage of devices and host over time."""
        return self._get("/devices/history", machine.DeviceHistory, {"span": span})

    def timeline(self, span: str = "1h", until: float | None = None) -> machine.JobTimeline:
        """Return what ran where, and when."""
        return self._get("/timeline", machine.JobTimeline, {"span": span, "until": until})

    def report(self, since: str = "7d", by: Literal["user", "workspace", "name"] = "user") -> machine.ReportAnswer:
        """Return GPU-hours, waits, waste and failures."""
        return self._get("/report", machine.ReportAnswer, {"since": since, "by": by})

    def summary(self, since: str | None = None) -> machine.QueueSummary:
        """Return what succeeded and failed since this moment, such as `"22:00"` or `"8h"`, why, and what it cost.
        Default: the last 18:00 that was at least 6 h ago."""
        return self._get("/summary", machine.QueueSummary, {"since": since})

    def _get(self, path: str, kind: type[T], query: Mapping[str, Any] | None = None) -> T:
        return convert(self._transport.request("GET", path, _texts(query or {})), kind)

    def _post(self, path: str, body: Mapping[str, Any], kind: type[T]) -> T:
        return convert(self._transport.request("POST", path, body=body), kind)

    def _find_id(self, job: int | str) -> int:
        """Return the id of the one job with this id or name."""
        if isinstance(job, int) or (job.isascii() and job.isdecimal()):
            return int(job)
        found = [each.id for each in self.queue(job, limit=2).jobs]
        if len(found) != 1:
            raise UserError(f"'{job}' matches {'several jobs' if found else 'no job'}", hint="name one job by its id")
        return found[0]


def _texts(query: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in query.items() if value is not None}


def _seconds(duration: float | str) -> float:
    return parse_duration(duration) if isinstance(duration, str) else float(duration)
