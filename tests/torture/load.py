"""The load of a torture run: clients that submit, change and follow jobs, and lease GPUs beside the queue.

One action about every second, at most MOST_CLIENTS at a time, and no new jobs while MOST_JOBS are unfinished: the
faults are the torture, and not the load.
"""

import contextlib
import random
import re
import threading
import time
from collections.abc import Callable

from gpuyard.client.fast_http import Exchange, dial, render_request
from gpuyard.errors import GpuyardError
from tests.torture.records import Submission
from tests.torture.target import GPUYARD, JOB, PYTHON, SCRIPT, Target

MOST_CLIENTS = 12
MOST_JOBS = 24
_EVERY_S = 0.6
# A client of the queue that takes longer than this does not come back.
HANGS_S = 100.0
_REFUSED = (2, 3, 4)
_KILLED = 0.05
_IDS = re.compile(r"(\d+)(?:-(\d+))?")
# Options and promised memory of jobs: `-` for whole devices, 0 for none.
_NEEDS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("--vram", "6G"), "6144"),
    (("--vram", "6G"), "6144"),
    (("--vram", "10G"), "10240"),
    (("--vram", "14G"), "14336"),
    (("--exclusive",), "-"),
    (("--gpus", "2", "--vram", "8G"), "8192"),
    (("--gpus", "2", "--exclusive"), "-"),
    (("--gpus", "0"), "0"),
    (("--gpus", "0"), "0"),
    ((), "0"),
)


class Load:
    """Starts clients until it is stopped. `submissions` are all that were sent, with their answers."""

    def __init__(self, target: Target, seed: int) -> None:
        self.target = target
        self.submissions: list[Submission] = []
        self.counts: dict[str, int] = {}
        self._dice = random.Random(f"load {seed}")
        self._stop = threading.Event()
        self._clients: list[threading.Thread] = []
        self._number = 0
        self._actions: list[tuple[int, str, Callable[[], None]]] = [
            (14, "submit", self._submit),
            (2, "array", self._array),
            (2, "dependent", self._dependent),
            (1, "impossible", self._impossible),
            (1, "cancel", lambda: self._change("cancel")),
            (1, "hold and release", self._hold),
            (1, "priority", lambda: self._change("priority", "--to", str(self._dice.randint(-5, 5)))),
            (1, "retry", lambda: self._change("retry")),
            (2, "run", self._run),
            (2, "script", self._script),
            (1, "logs -f", self._follow_log),
            (1, "queue", lambda: self._read("queue", "--all")),
            (1, "wait", lambda: self._follow("wait", "--timeout", "10s")),
            (1, "leases", lambda: self._read("leases")),
            (1, "watch", lambda: self._start(self._watch)),
        ]
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> int:
        """Start no more clients, and return how many have not ended after this time."""
        self._stop.set()
        self._thread.join(timeout_s)
        deadline = time.monotonic() + timeout_s
        for client in self._clients:
            client.join(max(0.0, deadline - time.monotonic()))
        return sum(client.is_alive() for client in self._clients)

    def _work(self) -> None:
        weights = [weight for weight, _, _ in self._actions]
        while not self._stop.wait(self._dice.uniform(0.5, 1.5) * _EVERY_S):
            self._clients = [client for client in self._clients if client.is_alive()]
            if len(self._clients) >= MOST_CLIENTS:
                continue
            [(_, name, act)] = self._dice.choices(self._actions, weights)
            if name in ("submit", "array", "dependent") and self._is_full():
                continue
            self.counts[name] = self.counts.get(name, 0) + 1
            act()

    def _is_full(self) -> bool:
        counts = self.target.status()
        final = ("succeeded", "failed", "cancelled", "rejected")
        return counts is not None and sum(n for state, n in counts.items() if state not in final) >= MOST_JOBS

    def _start(self, act: Callable[[], None]) -> None:
        client = threading.Thread(target=act, daemon=True)
        self._clients.append(client)
        client.start()

    def _name(self, kind: str) -> str:
        self._number += 1
        return f"{kind}{self._number}"

    # Jobs

    def _program(self, name: str, mb: str, plan: str, seconds: float, lines: int | None = None) -> list[str]:
        count = lines if lines is not None else max(2, int(seconds * 4))
        return [*PYTHON, JOB, str(self.target.evidence.path), name, mb, f"{seconds:.2f}", str(count), plan]

    def _submit(self) -> None:
        dice = self._dice
        options, mb = dice.choice(_NEEDS)
        seconds = dice.choice((0.3, 1.0, 3.0, 6.0, 12.0))
        kind = dice.choice(("ok", "ok", "ok", "ok", "fail", "flaky", "oom", "limit", "stubborn", "capped"))
        submission = Submission(name=self._name("s"))
        lines = None
        if kind == "fail":
            submission.plan = f"fail:{dice.randint(1, 100)}"
        elif kind == "flaky":
            submission.plan, options = "flaky:2", (*options, "--retries", "3")
        elif kind == "oom" and mb not in ("0", "-"):
            submission.plan = "oom"
        elif kind in ("limit", "stubborn"):
            submission.limit_s, seconds = dice.choice((3.0, 20.0)), dice.choice((2.0, 60.0))
            submission.plan = "stubborn" if kind == "stubborn" else "ok"
            options = (*options, "--time-limit", f"{submission.limit_s:g}s", "--grace", "2s")
        elif kind == "capped":
            submission.is_capped, lines = True, 20_000
            options = (*options, "--log-cap", "100K")
        self._send(submission, list(options), self._program(submission.name, mb, submission.plan, seconds, lines))

    def _array(self) -> None:
        count = self._dice.randint(2, 6)
        submission = Submission(name=self._name("a"), count=count)
        program = self._program(submission.name, "6144", "ok", self._dice.choice((0.3, 2.0)))
        self._send(submission, ["--vram", "6G", "--array", f"0-{count - 1}"], program)

    def _dependent(self) -> None:
        earlier = self._some_job()
        if earlier is not None:
            submission = Submission(name=self._name("d"))
            how = self._dice.choice(("--after", "--after-any", "--after-failed"))
            program = self._program(submission.name, "0", "ok", 0.3)
            self._send(submission, ["--gpus", "0", how, str(earlier)], program)

    def _impossible(self) -> None:
        submission = Submission(name=self._name("x"), is_valid=False)
        wrong = self._dice.choice((["--vram", "900G"], ["--after", "99999999"], ["--gpus", "9"]))
        self._send(submission, wrong, self._program(submission.name, "0", "ok", 0.3))

    def _send(self, submission: Submission, options: list[str], program: list[str]) -> None:
        self.submissions.append(submission)
        # Some clients are killed before they have read the answer.
        is_killed = self._dice.random() < _KILLED
        timeout_s = self._dice.uniform(0.05, 0.6) if is_killed else HANGS_S

        def send() -> None:
            command = ["submit", "--name", submission.name, *options, "--", *program]
            done = self.target.gpuyard(*command, timeout_s=timeout_s)
            submission.text = done.err.strip()
            if done.status is None and not is_killed:
                self.target.happened.observed.append(f"submit {submission.name} hung for {done.took_s:.0f} s")
            elif done.status in _REFUSED:
                submission.answer = "refused"
            elif done.status == 0 and (match := _IDS.fullmatch(done.out.strip())):
                submission.ids = tuple(range(int(match[1]), int(match[2] or match[1]) + 1))
                submission.answer = "accepted"

        self._start(send)

    # Changes

    def _some_job(self) -> int | None:
        accepted = [job for each in self.submissions[-30:] for job in each.ids]
        return self._dice.choice(accepted) if accepted else None

    def _change(self, verb: str, *more: str) -> None:
        job = self._some_job()
        if job is not None:
            if verb == "cancel":
                self.target.happened.cancelled.add(job)
            self._start(lambda: self._ask(verb, str(job), *more))

    def _hold(self) -> None:
        job = self._some_job()
        if job is not None:

            def hold_and_release() -> None:
                self._ask("hold", str(job))
                self._ask("release", str(job))

            self._start(hold_and_release)

    def _ask(self, *arguments: str) -> None:
        done = self.target.gpuyard(*arguments, timeout_s=HANGS_S)
        if done.status is None:
            self.target.happened.observed.append(f"gpuyard {' '.join(arguments)} hung for {done.took_s:.0f} s")

    def _read(self, *arguments: str) -> None:
        self._start(lambda: self._ask(*arguments))

    def _follow_log(self) -> None:
        """Follow the log of a job, which may wait for long."""
        job = self._some_job()
        if job is not None:
            self._start(lambda: self._beside([*GPUYARD, "logs", str(job), "-f"]))

    def _follow(self, *arguments: str) -> None:
        job = self._some_job()
        if job is not None:
            self._start(lambda: self._ask(*arguments[:1], str(job), *arguments[1:]))

    def _watch(self) -> None:
        """Read the event stream until the daemon ends it, or is silent for 10 s."""
        message = render_request("GET", "/events", {"watch": "/status /jobs"}, None, {})
        until = time.monotonic() + 15.0
        with contextlib.suppress(OSError, GpuyardError):
            connection = dial(str(self.target.home / "daemon.sock"))
            if connection is not None:
                with contextlib.closing(connection):
                    exchange = Exchange(connection, 10.0)
                    exchange.send(message)
                    exchange.receive_head()
                    for _ in exchange.events(10.0):
                        if time.monotonic() > until:
                            return

    # Beside the queue

    def _run(self) -> None:
        name, seconds = self._name("run"), self._dice.choice((0.5, 3.0))
        options, mb = self._dice.choice(((("--vram", "6G"), "6144"), ((), "-")))
        program = self._program(name, mb, "ok", seconds)
        self._start(lambda: self._beside([*GPUYARD, "run", *options, "--wait", "40s", "--", *program]))

    def _script(self) -> None:
        name, seconds = self._name("script"), self._dice.choice(("0.5", "3.0"))
        mb, gpus = self._dice.choice((("6144", "1"), ("-", "1"), ("8192", "2")))
        program = [PYTHON[0], SCRIPT, str(self.target.evidence.path), name, mb, seconds, gpus]
        self._start(lambda: self._beside(program))

    def _beside(self, command: list[str]) -> None:
        self.target.run(command, HANGS_S)
