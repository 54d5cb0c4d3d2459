"""Users: the requests that they send, the answers that they got, and what they do without an answer.

As in the daemon, a request that may change the queue takes back what waits for its turn in a slice, and is carried out
when no job does, or after a while.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.lease import Drain
from gpuyard.model.selection import parse_selection
from gpuyard.model.submission import Submission, SubmissionRequest, parse_submission
from gpuyard.queue.edit_jobs import JobEditor, fit_to_machine
from gpuyard.queue.user_requests import Act, ChangeResult
from gpuyard.store.queue_queries import JobEdits
from tests.simulation.behaviors import DECLARED
from tests.simulation.engine import UNPASSABLE
from tests.simulation.simulated_daemon import SimulatedDaemon
from tests.simulation.world import World

MOST_TRIES = 5
# As in the daemon: a keeper that is stopped is not waited for any longer.
KEEPER_ANSWERS_S = 2.0
# Orders after which some jobs do not start, and what takes each back.
STOPS = {"pause": "unpause", "drain": "undrain", "stop_tag": "start_tag"}
TAGS = ("night", "day")
EDITS: tuple[dict[str, Any], ...] = (
    {"vram": "9G"}, {"time-limit": "1s"}, {"tag": "day"}, {"tag": None}, {"exclusive": True}, {"at": "+1s"},
)  # fmt: skip
KINDS = {
    "submit": 50, "cancel": 10, "hold": 6, "release": 6, "retry": 8, "priority": 6, "pause": 2, "unpause": 4,
    "kill": 4, "reboot": 3, "why": 5, "suspend": 8, "resume": 6,
}  # fmt: skip
# For scenarios about memory: devices are full, and jobs compete.
CROWDED = {"suspend": 30, "resume": 20, "hold": 2, "cancel": 6, "pause": 0, "submit": 70}


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A request at a time. A missing submission or selection of jobs is drawn from the seed."""

    at: float
    kind: str
    number: int = 0
    asked: SubmissionRequest | None = None
    jobs: str | None = None
    priority: int | None = None
    options: dict[str, Any] | None = None


def operations(seed: int, count: int, within_s: float, *, is_crowded: bool = False) -> list[Operation]:
    random = Random(f"{seed} operations")
    times = sorted(random.choice((0.0, random.uniform(0.0, within_s))) for _ in range(count))
    weights = KINDS | CROWDED if is_crowded else KINDS
    kinds = ["submit", *random.choices(list(weights), list(weights.values()), k=count - 1)]
    return [
        Operation(at=at, kind=kind, number=number) for number, (at, kind) in enumerate(zip(times, kinds, strict=True))
    ]


@dataclass(kw_only=True)
class Sent:
    """A submission; `ids` are set when it was acknowledged."""

    asked: SubmissionRequest
    count: int
    ids: tuple[int, int] | None = None
    tries: int = 0
    is_given_up: bool = False

    def submission(self) -> Submission:
        return parse_submission(self.asked)


@dataclass(kw_only=True)
class Request:
    """`waits_until` is set when it has arrived: the keeper has until then to report what it has begun, and then the
    request `is_open`: it is being carried out. `stops` is what it forbids, `allows` what it allows again."""

    pieces: Generator[None, None, Any]
    done: Callable[[Any], None]
    sent: Sent | None = None
    stops: str = ""
    allows: str = ""
    waits_until: float | None = None
    is_open: bool = False


@dataclass
class Clients:
    world: World
    is_crowded: bool = False
    sent: dict[str, Sent] = field(default_factory=dict)
    waiting: list[Request] = field(default_factory=list)
    again: list[Sent] = field(default_factory=list)
    frozen: dict[int, str] = field(default_factory=dict)
    refused: int = 0
    retried: int = 0

    def jobs(self) -> list[int]:
        return [job_id for one in self.sent.values() if one.ids for job_id in range(one.ids[0], one.ids[1] + 1)]

    # Sending

    def ask(self, operation: Operation, daemon: SimulatedDaemon) -> None:
        random = Random(f"{self.world.seed} operation {operation.number}")
        if operation.kind == "submit":
            self.submit(operation.asked or self._submission(f"s{operation.number}", random), daemon)
        elif operation.kind in STOPS or operation.kind in STOPS.values():
            self.order(operation.kind, operation.jobs or self._target(operation.kind, random), daemon)
        elif operation.kind == "why":
            for job_id in self.jobs():
                daemon.explain(job_id)
        elif operation.kind == "edit" and self.jobs():
            options = operation.options or random.choice(EDITS)
            self.edit(operation.jobs or self._selection(random, prefers_all=False), options, daemon)
        elif self.jobs():
            priority = random.randint(-2, 3) if operation.priority is None else operation.priority
            meant = operation.jobs or self._selection(random, prefers_all=operation.kind in ("suspend", "resume"))
            self.change(operation.kind, meant, priority, daemon)

    def submit(self, asked: SubmissionRequest, daemon: SimulatedDaemon) -> None:
        sent = Sent(asked=asked, count=0)
        try:
            sent.count = sent.submission().count
        except UserError:
            self.refused += 1
            return
        self.sent[asked.token] = sent
        self.send(sent, daemon)

    def send(self, sent: Sent, daemon: SimulatedDaemon) -> None:
        sent.tries += 1
        try:
            fitted = fit_to_machine(sent.submission(), self.world.snapshot(), ())
        except (UserError, EnvironmentFault):  # or no device can be used now
            self.refused += 1
            sent.is_given_up = True
            return

        def done(ids: tuple[int, int]) -> None:
            assert sent.ids in (None, ids), "a submission that was sent again has other ids"
            assert ids[1] - ids[0] + 1 == sent.count
            sent.ids = ids
            self.world.record("acknowledged", (sent.asked.token, ids))

        self.waiting.append(Request(pieces=daemon.requests.submit(fitted, "me"), done=done, sent=sent))

    def order(self, kind: str, target: str, daemon: SimulatedDaemon) -> None:
        """Pause the queue, drain a device or stop a tag, or take that back."""

        def act() -> Generator[None, None, None]:
            if kind in ("pause", "unpause"):
                daemon.requests.set_paused(paused=kind == "pause")
            elif kind in ("stop_tag", "start_tag"):
                daemon.requests.set_stopped(target, stopped=kind == "stop_tag")
            elif kind == "drain":
                self.world.drains[target] = Drain(device_id=target, uid=7, user="other", since=self.world.now)
            else:
                self.world.drains.pop(target, None)
            yield from ()

        stops = next((stop for stop, start in STOPS.items() if kind == start), kind)
        key = f"{stops} {target}".strip()
        if kind in STOPS:
            request = Request(pieces=act(), done=lambda _: self.world.record("stopped", key), stops=key)
        else:
            request = Request(pieces=act(), done=lambda _: None, allows=key)
        self.waiting.append(request)

    def _target(self, kind: str, random: Random) -> str:
        if kind in ("pause", "unpause"):
            return ""
        if kind in ("stop_tag", "start_tag"):
            return random.choice(TAGS)
        return random.choice(self.world.device_ids) if self.world.device_ids else "none"

    def edit(self, text: str, options: dict[str, Any], daemon: SimulatedDaemon) -> None:
        edits = JobEdits(daemon.database, daemon.store)

        def fit(submission: Submission) -> Submission:
            return fit_to_machine(submission, self.world.snapshot(), ())

        editor = JobEditor(daemon.controller.transitions, edits, self.world.clock, options, fit)

        def pieces() -> Generator[None, None, ChangeResult]:
            changed = yield from daemon.requests.change(parse_selection(text), editor.edit)
            with daemon.store.transaction():
                editor.finish()
            return changed

        def done(changed: ChangeResult) -> None:
            self.world.record("edit", (text, changed.ids))

        self.waiting.append(Request(pieces=pieces(), done=done))

    def change(self, kind: str, text: str, priority: int, daemon: SimulatedDaemon) -> None:
        selection = parse_selection(text)
        requests = daemon.requests
        acts: dict[str, Act] = {
            "cancel": requests.cancel, "hold": requests.hold, "release": requests.release, "retry": requests.retry,
            "resume": requests.resume, "priority": lambda job, now: requests.prioritise(job, now, priority),
        }  # fmt: skip
        if kind == "suspend":
            sample = daemon.sample()
            acts[kind] = lambda job, now: requests.suspend(job, now, sample)
        pieces = requests.change(selection, acts[kind])
        if kind in ("release", "retry"):
            self.frozen.clear()  # it may happen from now on, even if the answer is lost
        self.retried += kind == "retry"

        def done(changed: ChangeResult) -> None:
            self.world.record(kind, (text, changed.ids))
            if kind in ("cancel", "hold"):
                self.frozen.update(dict.fromkeys(changed.ids, kind))

        self.waiting.append(Request(pieces=pieces, done=done))

    # Answers

    def proceed(self, daemon: SimulatedDaemon) -> None:
        """Advance each request in progress by one chunk."""
        for request in list(self.waiting):
            if request.waits_until is None:
                self._begin(request, daemon)
            if self._waits_for_keeper(request, daemon):
                continue
            if request.allows:
                self.world.record("allowed", request.allows)  # from now on, even if the answer is lost
            try:
                next(request.pieces)
            except StopIteration as end:
                self._finish(request, daemon)
                request.done(end.value)
            except UserError:
                self._finish(request, daemon)
                self.refused += 1
            except EnvironmentFault:
                self._finish(request, daemon)
                self._try_again(request)

    def _begin(self, request: Request, daemon: SimulatedDaemon) -> None:
        request.waits_until = self.world.now + KEEPER_ANSWERS_S
        daemon.begin_change()
        self.world.record("change begins", None)
        if request.stops:
            self.world.record("asked", request.stops)

    def _finish(self, request: Request, daemon: SimulatedDaemon) -> None:
        self.waiting.remove(request)
        self.world.record("change ends", None)
        daemon.end_change()

    def _waits_for_keeper(self, request: Request, daemon: SimulatedDaemon) -> bool:
        """Return whether the keeper may still report what it has begun, before anything of the request is done."""
        if request.is_open or request.waits_until is None:
            return False
        request.is_open = self.world.now >= request.waits_until or not daemon.has_upcoming
        return not request.is_open

    def wait_until(self, daemon: SimulatedDaemon) -> float | None:
        """Return when the first request ceases to wait for the keeper, if all of them do."""
        if not daemon.has_upcoming:
            return None
        times = [request.waits_until for request in self.waiting if not request.is_open]
        known = [at for at in times if at is not None]
        return min(known) if known and len(known) == len(self.waiting) else None

    def lose_daemon(self) -> None:
        waiting, self.waiting = self.waiting, []
        for request in waiting:
            self._try_again(request)

    def send_again(self, daemon: SimulatedDaemon) -> None:
        again, self.again = self.again, []
        for sent in again:
            self.send(sent, daemon)

    def _try_again(self, request: Request) -> None:
        sent = request.sent
        if sent is None:
            return
        if sent.tries < MOST_TRIES and self.world.random("try again").random() < 0.8:
            self.again.append(sent)
        else:
            sent.is_given_up = True

    # Contents of requests

    def _submission(self, token: str, random: Random) -> SubmissionRequest:
        gpus = random.choice((1, 1, 1, 1, 2) if self.is_crowded else (0, 0, 1, 1, 1, 1, 2))
        options: dict[str, Any] = {"name": token, "gpus": str(gpus)}
        command = ["wild", token]
        if options["gpus"] != "0":
            declared = random.choice((None, None, None, 4, 9, 12))
            if declared is not None:
                options["vram"] = f"{declared}G"
                command.append(f"{DECLARED}{declared * 1024}")
            options.update({"exclusive": True} if declared == 12 or random.random() < 0.1 else {})
            options.update({"preempt": True} if random.random() < (0.4 if self.is_crowded else 0.1) else {})
            options.update(random.choice(({}, {}, {}, {"device": "1"})) if options["gpus"] == "1" else {})
        if random.random() < 0.3:
            options["array"] = f"0-{random.randint(0, 7)}{random.choice(('', '%1', '%2', '%3'))}"
            command.append("{index}")
        self._add_options(options, random)
        if random.random() < 0.03:
            command.append(UNPASSABLE)
        return SubmissionRequest(cwd="/", environment={}, token=token, command=tuple(command), options=options)

    def _add_options(self, options: dict[str, Any], random: Random) -> None:
        chances: tuple[tuple[float, str, Callable[[], Any]], ...] = (
            (0.4, "priority", lambda: str(random.randint(-2, 3))),
            (0.4, "retries", lambda: str(random.randint(1, 2))),
            (0.3, "time-limit", lambda: f"{random.randint(1, 12)}s"),
            (0.5, "grace", lambda: f"{random.randint(0, 4)}s"),
            (0.3, "duration", lambda: f"{random.randint(1, 20)}s"),
            (0.3, "tag", lambda: random.choice(("night", "day"))),
            (0.1, "hold", lambda: True),
            (0.5, "on-reboot", lambda: random.choice(("requeue", "hold", "fail"))),
            (0.4, "on-preempt", lambda: random.choice(("suspend", "requeue", "never"))),
        )
        for chance, name, value in chances:
            if random.random() < chance:
                options[name] = value()
        if self.jobs() and random.random() < 0.4:
            kind = random.choice(("after", "after-any", "after-failed"))
            some = [str(random.choice(self.jobs())) for _ in range(random.randint(1, 2))]
            options[kind] = random.choice((some, some, some, ["all"]))

    def _selection(self, random: Random, *, prefers_all: bool) -> str:
        jobs = self.jobs()
        first = random.choice(jobs)
        names = [f"name={one.asked.token}" for one in self.sent.values() if one.ids]
        kinds = (str(first), str(first), f"{first}-{first + 2}", random.choice(names), "all")
        return random.choice((*kinds, *["all"] * 4 * prefers_all))
