"""The runner: starts in place of a task's program, runs it on a terminal of its own, and watches for its marker.

    the keeper ── the runner ── the program            tmux ── a viewer (`viewer.py`)
                      └──────────── a socket ──────────────────────┘

- The program is the runner's child, so its lease, status, signals and log work as for any other job; it continues if
  tmux is missing, fails or is killed. The runner exits after it, with a status that `task_files.py` decides; no signal
  but SIGKILL ends it earlier.
- Closing the session by hand ends the task, as people expect. A session that vanishes is reopened, up to 3 times.
- If the workspace's hook fails before the program, that does not start, and the attempt has failed. If it fails after,
  the record notes that, and the result stays. Without a result in the record, ask the queue."""

import json
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Mapping

import msgspec

from gpuyard.engines.session import task_files, viewer
from gpuyard.engines.session.pty_program import AFTER, BEFORE, KILL_AFTER_S, Hook, PtyProgram, hook_variables
from gpuyard.engines.session.tmux import Tmux, TmuxError
from gpuyard.engines.session.viewer import Handlers, Loop, ViewerSockets
from gpuyard.errors import EnvironmentFault
from gpuyard.model.job_spec import Task
from gpuyard.system.private_files import PrivateFileError
from gpuyard.system.wakeable_poll import open_signal_pipe

_VIEWER_EXPECTED_WITHIN_S = 10.0
# The runner ignores signals to the attempt's processes, which are for the program. It does not ignore job control,
# which has to stop both, nor its own faults.
_SURVIVED = signal.valid_signals() - {
    signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU,
    signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS,
}  # fmt: skip


class RunnerSpec(Task, frozen=True, kw_only=True):
    """A task, and its attempt."""

    command: list[str]
    key: str
    job: int
    attempt: int
    sockets: str
    gpu: str
    log_cap: int | None = None
    retried: str = ""


class TaskRunner:
    def __init__(self, spec: RunnerSpec, environment: Mapping[str, str]) -> None:
        self._spec = spec
        self._loop = Loop()
        self._signals: set[int] = set()
        for signum in _SURVIVED:
            signal.signal(signum, lambda number, _: self._signals.add(number))
        self._signal_pipe, _ = open_signal_pipe()
        self._loop.watch(self._signal_pipe, self._handle_signals)
        self._environment = environment
        self._program = PtyProgram(spec.command, environment)
        self._hook: Hook | None = None
        self._hook_problem: str | None = None
        self._tmux = Tmux(environment, hidden=spec.variable)
        self._outputs = [task_files.Output(1, "the job's log")]
        self._viewers: ViewerSockets | None = None
        self._log: str | None = None
        self._session: str | None = None
        self._times_reopened = 0
        self._notes: list[str] = []
        self._started_at, self._started = time.time(), time.monotonic()
        self._status: int | None = None
        self._was_stopped = False
        self._was_closed = False
        self._overstayed = False

    def run(self) -> int:
        if self._has_marker():
            return self._skip()
        if self._spec.session is not None:
            self._accept_viewers()
        if self._spec.log is not None:
            self._open_log(self._spec.log)
        spec, when = self._spec, time.strftime("%Y-%m-%d %H:%M:%S")
        about = f"{spec.config}, job {spec.job}, attempt {spec.attempt}, on {spec.gpu}, {when}"
        line = os.fsencode(f"--- {task_files.printable(about)} ---\r\n")
        for each in self._outputs[1:]:
            each.write(line)
        if self._viewers is not None:
            self._viewers.show(line)
        if self._spec.retried:
            self._log_event(f"retried, {self._spec.retried}")
        if self._viewers is not None:
            self._open_session()
        self._write_record()
        self._loop.watch(self._program.fileno(), self._serve)
        self._loop.after(self._spec.delay_s, self._start)
        while self._status is None:
            self._loop.turn()
        return self._finish(self._status)

    def _skip(self) -> int:
        """Complete a task that has its marker: an earlier attempt may have been killed before it reported success."""
        note = "its marker was there already, so it was not run"
        self._note(note)
        self._log_event(f"completed: {note}")
        self._write_record(task_files.Conclusion(task_files.COMPLETED, 0), marker_by="program")
        self._close_sessions()
        return 0

    def _open_log(self, path: str) -> None:
        try:
            line = task_files.owner_line(self._spec.owner.partition("/")[0], self._spec.workspace)
            log, self._log = task_files.open_log(path, self._spec.other_log, line)
        except PrivateFileError as error:
            self._note(f"no log of its own: {error.message}")
        else:
            self._outputs.append(task_files.Output(log, self._log, self._spec.log_cap))

    def _accept_viewers(self) -> None:
        handlers: Handlers = {
            viewer.KEYS: self._type,
            viewer.SIZE: lambda size: self._program.resize(*struct.unpack(viewer.SIZE_FORMAT, size)),
            viewer.CLOSED: self._close,
        }
        try:
            self._viewers = ViewerSockets(self._loop, self._spec.sockets, self._spec.key, handlers, self._reopen_later)
        except (OSError, EnvironmentFault) as error:
            why = error.strerror if isinstance(error, OSError) else error.message
            self._note(f"no session: {self._spec.sockets} cannot be used: {why}")

    def _open_session(self) -> None:
        command = viewer.command(self._spec.sockets, self._spec.key)
        try:
            self._session = self._tmux.open_session(self._spec.session or "", self._spec.owner, command)
        except TmuxError as error:
            self._session = None
            self._note(f"no session: {error.message}")
        else:
            # A viewer connects in about 0.1 s. Without this timer, a tmux server that dies earlier would go unnoticed.
            def expect_viewer() -> None:
                if self._viewers is not None and not self._viewers.viewers:
                    self._reopen_later()

            self._loop.after(_VIEWER_EXPECTED_WITHIN_S, expect_viewer)

    def _start(self) -> None:
        if self._status is not None:
            return
        if self._spec.hook:
            self._start_hook(hook_variables(BEFORE, self._spec.gpu, self._log))
        else:
            self._start_program()

    def _start_hook(self, variables: Mapping[str, str]) -> None:
        environment = {**self._environment, **variables}
        hook = self._hook = Hook(self._spec.hook, environment, self._spec.hook_timeout_s, self._loop)
        self._loop.watch(hook.fileno(), lambda _: self._pass_on(hook.read()))

    def _finish_hook(self, hook: Hook) -> None:
        """Go on after a hook that has ended. If the program has ended already, nothing depends on the hook."""
        self._hook = None
        self._pass_on_rest(hook)
        if self._status is not None and hook.problem is not None:
            self._note(f"the hook after it {hook.problem}")
            self._log_event(f"the hook after it {hook.problem}")
        elif self._status is not None:
            return
        elif self._was_stopped or self._was_closed:
            self._status = task_files.TERMINATED if self._was_stopped else task_files.HUNG_UP
        elif hook.problem is not None:
            self._hook_problem = f"the hook before it {hook.problem}, so it was not started"
            self._status = hook.status()
        else:
            self._start_program()

    def _start_program(self) -> None:
        self._program.start()
        self._log_event(f"started on {self._spec.gpu} (job {self._spec.job}, attempt {self._spec.attempt})")
        self._check_marker()

    def _serve(self, event: int) -> None:
        if event & select.POLLOUT:
            self._type()
        self._pass_on(self._program.read())

    def _pass_on(self, output: bytes) -> None:
        for each in self._outputs:
            each.write(output)
        if self._viewers is not None and output:
            self._viewers.show(output)

    def _pass_on_rest(self, program: PtyProgram) -> None:
        for output in program.remaining_output():
            self._pass_on(output)

    def _type(self, keys: bytes = b"") -> None:
        if self._hook is not None:
            self._hook.type(keys)
            return
        self._loop.want_to_write(self._program.fileno(), wants=self._program.type(keys))

    def _handle_signals(self, _: int) -> None:
        os.read(self._signal_pipe, 4096)
        self._was_stopped = signal.SIGTERM in self._signals
        if self._hook is not None:
            if self._hook.status() is not None:
                self._finish_hook(self._hook)
        elif self._program.pid is not None:
            self._status = self._program.status()
        elif self._was_stopped:
            self._status = task_files.TERMINATED

    def _check_marker(self) -> None:
        if self._status is not None:
            return
        if self._has_marker():
            self._loop.after(self._spec.grace_s, self._end_overstayer)
        else:
            self._loop.after(self._spec.check_s, self._check_marker)

    def _has_marker(self) -> bool:
        return os.path.lexists(self._spec.marker)

    def _end_overstayer(self) -> None:
        if self._status is not None or not self._has_marker():
            self._check_marker()
            return
        self._overstayed = True
        self._print_end("it goes on after its marker, and is ended")
        self._end_with(signal.SIGTERM)

    def _close(self, _: bytes) -> None:
        if self._status is None:
            self._was_closed = True
            self._print_end("its session was closed, and it is ended")
            if self._program.pid is None and self._hook is None:
                self._status = task_files.HUNG_UP
        self._end_with(signal.SIGHUP)

    def _end_with(self, signum: int) -> None:
        running = self._hook or self._program
        running.signal(signum)
        self._loop.after(KILL_AFTER_S, lambda: running.signal(signal.SIGKILL))

    def _reopen_later(self) -> None:
        def reopen() -> None:
            self._open_session()
            self._write_record()

        if self._times_reopened < 3 and not self._was_closed:
            self._times_reopened += 1
            self._loop.after(1.0, reopen)

    def _finish(self, status: int) -> int:
        self._pass_on_rest(self._program)
        end = task_files.conclude(
            status,
            has_marker=self._overstayed or self._has_marker(),
            overstayed=self._overstayed,
            was_stopped=self._was_stopped,
            was_closed=self._was_closed,
        )
        if self._hook_problem is not None and end.result == task_files.FAILED:
            end = end._replace(note=self._hook_problem)
            self._print_end(self._hook_problem)
        marker_by = "program" if self._has_marker() else None
        if end.writes_marker and self._write_marker():
            marker_by = "gpuyard"
        if self._spec.hook and self._program.pid is not None:
            self._write_record(end, status, marker_by)
            self._start_hook(hook_variables(AFTER, self._spec.gpu, self._log, end.result, status))
            while self._hook is not None:
                self._loop.turn()
        for each in self._outputs:
            each.finish()
        self._notes += [text for text in (end.note, *(each.problem for each in self._outputs)) if text]
        self._write_record(end, status, marker_by)
        how = f" with status {status}" if end.result == task_files.FAILED else ""
        self._log_event(f"{end.result}{how}{f': {end.note}' if end.note else ''}")
        if self._viewers is not None:
            took_s = time.monotonic() - self._started
            text = f"[{self._spec.config} {end.result}, status {status}, after {took_s:.0f} s]"
            wait_s = 0.0 if self._session is None else _VIEWER_EXPECTED_WITHIN_S
            self._viewers.end(status, f"\r\n{task_files.printable(text)}\r\n", wait_s)
        if end.result == task_files.COMPLETED:
            self._close_sessions()
        return end.status

    def _write_marker(self) -> bool:
        spec = self._spec
        text = f"exited with status 0 and wrote no marker; written by gpuyard (job {spec.job}, attempt {spec.attempt})"
        when, name = time.strftime("%Y-%m-%d %H:%M:%S"), task_files.printable(spec.config)
        try:
            task_files.write_whole(spec.marker, f"{when} {name} {text}\n")
        except OSError as error:
            self._note(f"its marker {spec.marker} cannot be written: {error.strerror}")
            return False
        return True

    def _close_sessions(self) -> None:
        """Close the task's sessions, including those of earlier attempts: on other GPUs they had other names."""
        owner = self._spec.owner
        if not self._spec.closes_session or self._spec.session is None or not self._tmux.is_there():
            return
        try:
            for name in self._tmux.owned_sessions(owner).get(owner, ()):
                self._tmux.kill_session(name, owner)
        except TmuxError as error:
            self._note(f"its session could not be closed: {error.message}")

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)
            self._pass_on(os.fsencode(f"--- gpuyard: {task_files.printable(text)} ---\r\n"))

    def _print_end(self, text: str) -> None:
        """Print why the task ends here: a failed job gives it as its reason."""
        self._pass_on(os.fsencode(f"gpuyard: {task_files.printable(text)}\r\n"))

    def _log_event(self, text: str) -> None:
        if self._spec.scheduler_log is not None:
            try:
                task_files.append_event(self._spec.scheduler_log, f"{self._spec.config} {text}")
            except PrivateFileError as error:
                self._note(error.message)

    def _write_record(
        self, end: task_files.Conclusion | None = None, status: int | None = None, marker_by: str | None = None
    ) -> None:
        content = {
            "job": self._spec.job,
            "attempt": self._spec.attempt,
            "config": self._spec.config,
            "session": self._session,
            "log": self._log,
            "started_at": self._started_at,
            "ended_at": None if end is None else time.time(),
            "status": status,
            "result": None if end is None else end.result,
            "note": "; ".join(self._notes) or None,
            "marker_by": marker_by,
        }
        try:
            task_files.write_whole(self._spec.record, json.dumps(content) + "\n")
        except OSError as error:
            self._note(f"{self._spec.record} cannot be written: {error.strerror}")


def main() -> None:
    sys.exit(TaskRunner(msgspec.convert(json.loads(sys.argv[1]), RunnerSpec), os.environ).run())
