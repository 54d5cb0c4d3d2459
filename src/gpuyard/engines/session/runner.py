"""The runner: it is started in place of a task's program, runs it on a terminal of its own, and minds its marker.

    the keeper ── the runner ── the program            tmux ── a viewer (`viewer.py`)
                      └──────────── a socket ──────────────────────┘

- The program is the runner's child: its lease, its status, signals to it and its log are as safe as any other job's.
  A session of tmux's is a window onto it. tmux may be missing, fail or be killed: the program goes on.
- The runner ends when the program has, with a status that tells the queue what it amounts to (`session_end.py`). No
  signal but SIGKILL ends it before: what is meant for the task reaches the program too.
- A session that is closed by hand ends the task, as people expect. One that vanishes is opened again, a few times.
- A program that goes on after its marker is left alone for `grace_s`, and is then ended.
- The workspace's hook (`session_hook.py`) runs before and after the program. If it fails before, the program is not
  started and the attempt has failed; if it fails after, that is noted and changes nothing.
- The record of its end, a file, is written at the beginning and at the end; whoever finds no result in it asks the
  queue.
"""

import json
import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpuyard.engines.session import viewer
from gpuyard.engines.session.poll_loop import Loop
from gpuyard.engines.session.pty_program import PtyProgram
from gpuyard.engines.session.task_files import Output, open_log, owner_line, printable, tell, write_whole
from gpuyard.engines.session.task_hook import AFTER, BEFORE, Hook, facts
from gpuyard.engines.session.task_outcome import COMPLETED, FAILED, HUNG_UP, TERMINATED, Conclusion, conclude
from gpuyard.engines.session.tmux import Tmux, TmuxError
from gpuyard.engines.session.viewer_sockets import Listeners, ViewerSockets
from gpuyard.system.private_files import PrivateFileError

_CODE = "import sys; sys.path.insert(0, sys.argv.pop(1)); from gpuyard.engines.session.runner import main; main()"
_KILL_AFTER_S = 10.0
_OPEN_AGAIN_AFTER_S = 1.0
_FIRST_VIEWER_WITHIN_S = 20.0
_MOST_OPENED_AGAIN = 3
# A viewer is there in a tenth of a second; a server that dies before that leaves nobody to miss.
_SEEN_WITHIN_S = 10.0
_LEAST_CHECK_S = 0.01
# Signals to all processes of an attempt are meant for the program, but for those that stop all of them. And faults are
# our own.
_SURVIVED = signal.valid_signals() - {
    signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU,
    signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS,
}  # fmt: skip


class RunnerSpec(NamedTuple):
    """The task and its attempt. All paths are absolute; `variable` names its devices in place of
    CUDA_VISIBLE_DEVICES."""

    command: list[str]
    key: str
    job: int
    attempt: int
    sockets: str
    config: str
    workspace: str
    owner: str
    gpu: str
    session: str | None
    marker: str
    record: str
    closes_session: bool = False
    log: str | None = None
    other_log: str | None = None
    scheduler_log: str | None = None
    variable: str | None = None
    check_s: float = 30.0
    delay_s: float = 0.5
    grace_s: float = 60.0
    hook: Sequence[str] = ()
    hook_timeout_s: float = 60.0


def command(spec: Mapping[str, object]) -> tuple[str, ...]:
    """The words that start a runner; `spec` has the fields of a Spec."""
    return viewer.isolated(_CODE, json.dumps(spec))


class TaskRunner:
    def __init__(self, spec: RunnerSpec, environment: Mapping[str, str]) -> None:
        self._spec = spec
        self._loop = Loop()
        self._signals: set[int] = set()
        self._wire = _lay_wire(self._signals)
        self._loop.watch(self._wire, self._heed)
        self._environment = environment
        self._program = PtyProgram(spec.command, environment)
        self._hook: Hook | None = None
        self._hook_problem: str | None = None
        self._tmux = Tmux(environment, hidden=spec.variable)
        self._outputs = [Output(1, "the job's log")]
        self._audience: ViewerSockets | None = None
        self._log: str | None = None
        self._session: str | None = None
        self._times_opened = 0
        self._notes: list[str] = []
        self._started_at = time.time()
        self._status: int | None = None
        self._was_stopped = False
        self._was_closed = False
        self._overstayed = False

    def run(self) -> int:
        if self._has_marker():
            return self._leave_out()
        if self._spec.session is not None:
            self._let_viewers_in()
        if self._spec.log is not None:
            self._open_log(self._spec.log)
        self._announce()
        if self._audience is not None:
            self._open_session()
        self._record()
        self._loop.watch(self._program.fileno(), self._attend)
        self._loop.after(self._spec.delay_s, self._begin)
        while self._status is None:
            self._loop.turn()
        return self._finish(self._status)

    # Before it starts

    def _leave_out(self) -> int:
        """What is done is not done again, though the attempt that did it may not have lived to say so."""
        end = Conclusion(COMPLETED, 0, "its marker was there already, so it was not run")
        self._tell(end.note or "")
        self._event(f"completed: {end.note}")
        self._record(end, marker_by="program")
        self._close_sessions()
        return end.status

    def _open_log(self, path: str) -> None:
        try:
            line = owner_line(self._spec.owner.partition("/")[0], self._spec.workspace)
            log, self._log = open_log(path, self._spec.other_log, line)
        except PrivateFileError as error:
            self._tell(f"no log of its own: {error.message}")
        else:
            self._outputs.append(Output(log, self._log))

    def _announce(self) -> None:
        """Where several attempts follow each other; the job's log has one alone."""
        spec, when = self._spec, time.strftime("%Y-%m-%d %H:%M:%S")
        about = f"{spec.config}, job {spec.job}, attempt {spec.attempt}, on {spec.gpu}, {when}"
        line = os.fsencode(f"--- {printable(about)} ---\r\n")
        for each in self._outputs[1:]:
            each.write(line)
        if self._audience is not None:
            self._audience.show(line)

    def _let_viewers_in(self) -> None:
        listeners = Listeners(keys=self._type, size=self._program.resize, closed=self._close, gone=self._miss_session)
        try:
            self._audience = ViewerSockets(self._loop, self._spec.sockets, self._spec.key, listeners)
        except OSError as error:
            self._tell(f"no session: {self._spec.sockets} cannot be used: {error.strerror}")

    def _open_session(self) -> None:
        words = viewer.command(self._spec.sockets, self._spec.key)
        try:
            self._session = self._tmux.open_session(self._spec.session or "", self._spec.owner, words)
        except TmuxError as error:
            self._session = None
            self._tell(f"no session: {error.message}")
        else:
            self._loop.after(_SEEN_WITHIN_S, self._expect_viewer)

    def _expect_viewer(self) -> None:
        if self._audience is not None and self._audience.is_empty:
            self._miss_session()

    def _begin(self) -> None:
        """Not where it was told to stop before."""
        if self._status is not None:
            return
        if self._spec.hook:
            self._start_hook(facts(BEFORE, self._spec.gpu, self._log))
        else:
            self._start()

    def _start_hook(self, told: Mapping[str, str]) -> None:
        environment = {**self._environment, **told}
        self._hook = Hook(self._spec.hook, environment, self._spec.hook_timeout_s, self._loop, self._pass_on)

    def _hear_of_hook(self, hook: Hook) -> None:
        """It has ended; after the program nothing depends on it."""
        self._hook = None
        if self._status is not None:
            if hook.problem is not None:
                self._tell(f"the hook after it {hook.problem}")
                self._event(f"the hook after it {hook.problem}")
        elif self._was_stopped or self._was_closed:
            self._status = TERMINATED if self._was_stopped else HUNG_UP
        elif hook.problem is not None:
            self._hook_problem = f"the hook before it {hook.problem}, so it was not started"
            self._status = hook.status
        else:
            self._start()

    def _start(self) -> None:
        self._program.start()
        self._event(f"started on {self._spec.gpu} (job {self._spec.job}, attempt {self._spec.attempt})")
        self._check_marker()

    # While it runs

    def _attend(self, event: int) -> None:
        if event & select.POLLOUT:
            self._type()
        self._pass_on(self._program.read())

    def _pass_on(self, output: bytes) -> None:
        for each in self._outputs:
            each.write(output)
        if self._audience is not None and output:
            self._audience.show(output)

    def _type(self, keys: bytes = b"") -> None:
        if self._hook is not None:
            self._hook.type(keys)
            return
        waits = self._program.type(keys)
        self._loop.want_to_write(self._program.fileno(), wants=waits)

    def _heed(self, _: int) -> None:
        os.read(self._wire, 4096)
        self._was_stopped = signal.SIGTERM in self._signals
        if self._hook is not None:
            if self._hook.has_ended():
                self._hear_of_hook(self._hook)
        elif self._program.pid is not None:
            self._status = self._program.status()
        elif self._was_stopped:
            self._status = TERMINATED

    def _check_marker(self) -> None:
        check_s = max(self._spec.check_s, _LEAST_CHECK_S)
        if self._status is not None:
            return
        if self._has_marker():
            self._loop.after(self._spec.grace_s, self._end_overstayer)
        else:
            self._loop.after(check_s, self._check_marker)

    def _has_marker(self) -> bool:
        return os.path.lexists(self._spec.marker)

    def _end_overstayer(self) -> None:
        if self._status is not None or not self._has_marker():
            self._check_marker()
            return
        self._overstayed = True
        self._say("it goes on after its marker, and is ended")
        self._end_with(signal.SIGTERM)

    def _close(self) -> None:
        if self._status is None:
            self._was_closed = True
            self._say("its session was closed, and it is ended")
            if self._program.pid is None and self._hook is None:
                self._status = HUNG_UP
        self._end_with(signal.SIGHUP)

    def _end_with(self, signum: int) -> None:
        running = self._hook or self._program
        running.signal(signum)
        self._loop.after(_KILL_AFTER_S, lambda: running.signal(signal.SIGKILL))

    def _miss_session(self) -> None:
        if self._times_opened < _MOST_OPENED_AGAIN and not self._was_closed:
            self._times_opened += 1
            self._loop.after(_OPEN_AGAIN_AFTER_S, self._open_again)

    def _open_again(self) -> None:
        self._open_session()
        self._record()

    # After its end

    def _finish(self, status: int) -> int:
        for output in self._program.rest():
            self._pass_on(output)
        end = conclude(
            status,
            has_marker=self._overstayed or self._has_marker(),
            overstayed=self._overstayed,
            was_stopped=self._was_stopped,
            was_closed=self._was_closed,
        )
        if self._hook_problem is not None and end.result == FAILED:
            end = end._replace(note=self._hook_problem)
            self._say(self._hook_problem)
        marker_by = "program" if self._has_marker() else None
        if end.writes_marker and self._write_marker():
            marker_by = "gpuyard"
        if self._spec.hook and self._program.pid is not None:
            self._record(end, status, marker_by)
            self._start_hook(facts(AFTER, self._spec.gpu, self._log, end.result, status))
            while self._hook is not None:
                self._loop.turn()
        for each in self._outputs:
            each.finish()
        self._notes += [text for text in (end.note, *(each.problem for each in self._outputs)) if text]
        self._record(end, status, marker_by)
        self._say_farewell(end, status)
        return end.status

    def _write_marker(self) -> bool:
        spec = self._spec
        text = f"exited with status 0 and wrote no marker; written by gpuyard (job {spec.job}, attempt {spec.attempt})"
        try:
            write_whole(spec.marker, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(spec.config)} {text}\n")
        except OSError as error:
            self._tell(f"its marker {spec.marker} cannot be written: {error.strerror}")
            return False
        return True

    def _say_farewell(self, end: Conclusion, status: int) -> None:
        how = f" with status {status}" if end.result == FAILED else ""
        self._event(f"{end.result}{how}{f': {end.note}' if end.note else ''}")
        seconds = time.time() - self._started_at
        if self._audience is not None:
            text = f"[{self._spec.config} {end.result}, status {status}, after {seconds:.0f} s]"
            patience_s = 0.0 if self._session is None else _FIRST_VIEWER_WITHIN_S
            self._audience.end(status, f"\r\n{printable(text)}\r\n", patience_s)
        if end.result == COMPLETED:
            self._close_sessions()

    def _close_sessions(self) -> None:
        """Also those of earlier attempts, which may have run on other GPUs and so have other names."""
        owner = self._spec.owner
        if not self._spec.closes_session or self._spec.session is None or not self._tmux.is_there():
            return
        try:
            for name in self._tmux.owned_sessions(owner).get(owner, ()):
                self._tmux.kill_session(name, owner)
        except TmuxError as error:
            self._tell(f"its session could not be closed: {error.message}")

    # What is told

    def _tell(self, text: str) -> None:
        if text in self._notes:
            return
        self._notes.append(text)
        self._say(text)

    def _say(self, text: str) -> None:
        self._pass_on(os.fsencode(f"gpuyard: {printable(text)}\r\n"))

    def _event(self, text: str) -> None:
        if self._spec.scheduler_log is None:
            return
        try:
            tell(self._spec.scheduler_log, f"{self._spec.config} {text}")
        except PrivateFileError as error:
            self._tell(error.message)

    def _record(self, end: Conclusion | None = None, status: int | None = None, marker_by: str | None = None) -> None:
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
            write_whole(self._spec.record, json.dumps(content) + "\n")
        except OSError as error:
            self._tell(f"{self._spec.record} cannot be written: {error.strerror}")


def _lay_wire(signals: set[int]) -> int:
    """A descriptor that is readable when a signal has come; which ones did is noted."""
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, False)
    for signum in _SURVIVED:
        signal.signal(signum, lambda number, _: signals.add(number))
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading


def main() -> None:
    said = json.loads(sys.argv[1])
    spec = RunnerSpec(**{name: said[name] for name in RunnerSpec._fields if name in said})
    sys.exit(TaskRunner(spec, os.environ).run())
