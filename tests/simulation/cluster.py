"""A simulated cluster: it takes parcels, lets their elements wait, runs them, loses some, and is not always there.

Its supervisors do what `engines/cluster/node_supervisor.py` does, to real files: whoever makes `N.began` first runs the
program, its word is in `N.ended`, and `N.lost` ends it. What programs do follows from the seed, the command and the
number of the attempt.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from gpuyard.core.cluster.offer import Amount, Offer, gpu_count
from gpuyard.engines.cluster.site import (
    OVER,
    ClusterSubmission,
    ElementRef,
    Sighting,
    SiteRefused,
    SiteReport,
    SiteState,
    SiteUnreachable,
)
from tests.simulation.world import World

GPUS = 4
MOST_JOBS = 6
_LOOK_FOR_LOSS_S = 2.0
_KILL_AFTER_S = 5.0
# What may become of what runs, beside its own end; and those of it after which nobody knows how it ended.
CALAMITIES = ("node", "orphaned", "forgotten", "supervisor", "oom", "preempted", "scancel")
LOSSES = frozenset({"node", "orphaned", "forgotten", "supervisor"})
_AT = {
    "node": SiteState.LOST, "orphaned": SiteState.LOST, "supervisor": SiteState.FAILED,
    "oom": SiteState.OUT_OF_MEMORY, "preempted": SiteState.PREEMPTED,
    "scancel": SiteState.CANCELLED,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Course:
    """How a program goes: how long, to which status; `calamity` befalls it half-way. Its word is late by `late_s`, or
    the site's is."""

    runs_s: float
    status: int = 0
    calamity: str = ""
    heeds_term: bool = True
    term_s: float = 0.0
    late_s: float = 0.0
    site_is_late: bool = False


CourseOf = Callable[[tuple[str, ...], int], Course]


def wild_course(seed: int) -> CourseOf:
    def course(words: tuple[str, ...], attempt: int) -> Course:
        random = Random(f"{seed} {words} {attempt} course")
        return Course(
            runs_s=random.choice((0.0, random.uniform(0.0, 1.0), random.uniform(1.0, 12.0))),
            status=random.choices((0, 3, 143), (80, 15, 5))[0],
            calamity=random.choice(CALAMITIES) if random.random() < 0.25 else "",
            heeds_term=random.random() < 0.8,
            term_s=random.choice((0.0, random.uniform(0.0, 3.0))),
            late_s=random.choice((0.0, random.uniform(0.0, 0.8))),
            site_is_late=random.random() < 0.5,
        )

    return course


@dataclass(kw_only=True)
class Run:
    """A program that has begun. `word` is what its supervisor has left."""

    job_id: int
    attempt: int
    course: Course
    began_at: float
    is_alive: bool = True
    is_supervised: bool = True
    ended_at: float | None = None
    word: str | None = None
    hit_by: str = ""

    @property
    def key(self) -> tuple[int, int]:
        return self.job_id, self.attempt


@dataclass(kw_only=True)
class Piece:
    """An element as the site has it."""

    mark: ElementRef
    parcel: ClusterSubmission
    gpus: float
    at: SiteState = SiteState.PENDING
    status: int | None = None
    is_due: bool = False
    run: Run | None = None

    @property
    def path(self) -> str:
        return f"{self.parcel.folder}/{self.mark[1]}"


class Cluster:
    """Implements `Site`. While it is `down` nobody reaches it; what it does `unheard` it does now or later, or not, and
    nobody hears of it. It `refuses` in these words. One that `tells_free` has no line to speak of, as Ray has none; the
    others take everything."""

    name = "yonder"
    most_in_submission = 5

    def __init__(self, world: World, shared: Path, course_of: CourseOf, *, tells_free: bool) -> None:
        self.runs: list[Run] = []
        self.pieces: dict[ElementRef, Piece] = {}
        self.down = False
        self.unheard = False
        self.refuses: str | None = None
        self.calls = 0
        self.took_late = False
        self.could_not_start = 0
        self._world = world
        self._shared = shared
        self._course_of = course_of
        self._tells_free = tells_free

    # What it is asked

    def submit(self, parcel: ClusterSubmission) -> str:
        self._answer()
        if self.refuses is not None:
            raise SiteRefused(self.refuses)
        if self.unheard and self._random("late").random() < 0.2:
            self.took_late = True
            self._world.after(self._random("late").uniform(0.5, 8.0), lambda: self._take(parcel))
            raise SiteUnreachable("it took too long to answer")
        self._take(parcel)
        is_over = self._tells_free and not self.took_late and self._in_use() > GPUS + 1e-6
        assert not is_over, f"{self._in_use()} GPUs were handed over, and there are {GPUS}"
        self._hear("submit")
        return ""

    def _take(self, parcel: ClusterSubmission) -> None:
        for number in range(parcel.count):
            piece = Piece(mark=(parcel.token, number), parcel=parcel, gpus=gpu_count(parcel.terms.need, None))
            assert piece.mark not in self.pieces, "the same parcel was handed over twice"
            self.pieces[piece.mark] = piece
            self._world.after(self._random("wait").uniform(0.0, 3.0), lambda piece=piece: self._due(piece))  # type: ignore[misc]

    def _in_use(self) -> float:
        return sum(piece.gpus for piece in self.pieces.values() if piece.at not in OVER)

    def report(self, live: Sequence[ClusterSubmission]) -> SiteReport:
        self._answer()
        tokens = {parcel.token for parcel in live}
        seen = {mark: self._sighting(piece) for mark, piece in self.pieces.items() if mark[0] in tokens}
        free = Amount(gpus=GPUS - self._in_use()) if self._tells_free else None
        return SiteReport(sightings=seen, offer=Offer(free=free, most_jobs=MOST_JOBS))

    def cancel(self, ids: Sequence[str]) -> None:
        self._answer()
        for piece in [piece for piece in self.pieces.values() if _id(piece) in ids]:
            if piece.at is SiteState.PENDING or (piece.at is SiteState.RUNNING and piece.run is None):
                piece.at = SiteState.CANCELLED
            elif piece.at is SiteState.RUNNING and piece.run is not None:
                self._end_politely(piece, piece.run, SiteState.CANCELLED)
        self._hear("cancel")

    def output(self, sighting: Sighting) -> bytes | None:
        return None

    def _answer(self) -> None:
        self.calls += 1
        if self.down:
            raise SiteUnreachable("nobody is there")

    def _hear(self, what: str) -> None:
        if self.unheard and self._random(what).random() < 0.3:
            raise SiteUnreachable("the answer was lost")

    def _sighting(self, piece: Piece) -> Sighting:
        run, is_running = piece.run, piece.at is SiteState.RUNNING
        return Sighting(
            id=_id(piece),
            at=piece.at,
            reason="its turn comes" if piece.at is SiteState.PENDING else "",
            place="n0" if is_running else "",
            started_at=run.began_at if run is not None else None,
            ended_at=run.ended_at if run is not None and not is_running else None,
            status=piece.status,
        )

    def calm_down(self) -> None:
        self.down = self.unheard = False
        self.refuses = None

    # What it does by itself

    def _random(self, kind: str) -> Random:
        return self._world.random(f"cluster {kind}")

    def _due(self, piece: Piece) -> None:
        piece.is_due = True
        self._schedule()

    def _schedule(self) -> None:
        """In the order in which they came; at most so many of a parcel's."""
        busy = sum(piece.gpus for piece in self.pieces.values() if piece.at is SiteState.RUNNING)
        for piece in list(self.pieces.values()):
            if piece.at is not SiteState.PENDING or not piece.is_due or busy + piece.gpus > GPUS + 1e-6:
                continue
            beside = sum(
                other.at is SiteState.RUNNING for other in self.pieces.values() if other.mark[0] == piece.mark[0]
            )
            if beside < (piece.parcel.terms.at_most or beside + 1):
                busy += piece.gpus
                piece.at = SiteState.RUNNING
                late_s = self._random("start").choice((0.0, self._random("start").uniform(0.0, 2.0)))
                self._world.after(late_s, lambda piece=piece: self._start(piece))  # type: ignore[misc]

    def _start(self, piece: Piece) -> None:
        """Its supervisor, who may start though it was cancelled a moment ago, and is ended at once then."""
        if piece.at is not SiteState.RUNNING and self._random("cancelled").random() < 0.5:
            return
        try:
            told = json.loads(Path(piece.parcel.folder, "parcel.json").read_bytes())["elements"][piece.mark[1]]
            file = os.open(f"{piece.path}.began", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            self._over(piece, SiteState.SUCCEEDED, 0)
            return
        except OSError:  # it is not where it was said to be
            self.could_not_start += 1
            self._over(piece, SiteState.FAILED, 1)
            return
        with open(file, "w") as stream:
            json.dump({"at": self._world.now, "node": "n0", "pid": 7}, stream)
        job_id, attempt = map(int, told["key"].split("."))
        self._run(piece, job_id, attempt, tuple(told["command"]))

    def _run(self, piece: Piece, job_id: int, attempt: int, words: tuple[str, ...]) -> None:
        course = self._course_of(words, attempt)
        run = piece.run = Run(job_id=job_id, attempt=attempt, course=course, began_at=self._world.now)
        assert run.key not in {each.key for each in self.runs}, f"attempt {run.key} runs twice"
        self.runs.append(run)
        self._world.tell("begins there", run.key)
        self._world.after(course.runs_s, lambda: self._finish(piece, run, str(course.status)))
        if course.calamity:
            self._world.after(course.runs_s / 2, lambda: self._befall(piece, run))
        if piece.at is not SiteState.RUNNING:
            self._finish(piece, run, "143")
        limit_s = piece.parcel.terms.limit_s
        if limit_s is not None:
            self._world.after(limit_s + 0.5, lambda: self._end_politely(piece, run, SiteState.TIMED_OUT))

    def _finish(self, piece: Piece, run: Run, word: str, at: SiteState | None = None) -> None:
        """It ends; its supervisor and the site say so, one after the other."""
        if not run.is_alive:
            return
        self._kill(run)
        status = int(word)
        found = at or (SiteState.FAILED if status else SiteState.SUCCEEDED)
        late_s = run.course.late_s
        self._world.after(0.0 if run.course.site_is_late else late_s, lambda: self._leave_word(piece, run, word))
        self._world.after(late_s if run.course.site_is_late else 0.0, lambda: self._over(piece, found, status))

    def _kill(self, run: Run) -> None:
        run.is_alive, run.ended_at = False, self._world.now
        self._world.tell("over there", run.key)

    def _leave_word(self, piece: Piece, run: Run, word: str) -> None:
        """It is tried again while the folder is away, unless nobody waits for it any more."""
        if not run.is_supervised:
            return
        try:
            draft = Path(f"{piece.path}.draft")
            draft.write_text(json.dumps({"word": word, "pid": 8, "at": self._world.now, "usage": None}))
            draft.rename(f"{piece.path}.ended")
            run.word = word
        except OSError:
            if not self._shared.is_dir():
                self._world.after(1.0, lambda: self._leave_word(piece, run, word))

    def _over(self, piece: Piece, at: SiteState, status: int | None) -> None:
        if piece.at is SiteState.RUNNING:
            piece.at, piece.status = at, status
            self._schedule()

    def _end_politely(self, piece: Piece, run: Run, at: SiteState) -> None:
        """SIGTERM, and after a while SIGKILL."""
        if run.is_alive and piece.at is SiteState.RUNNING:
            heeds, term_s = run.course.heeds_term, run.course.term_s
            after_s, word = (term_s, "143") if heeds else (_KILL_AFTER_S, "137")
            self._world.after(after_s, lambda: self._finish(piece, run, word, at))

    def _befall(self, piece: Piece, run: Run) -> None:
        calamity = run.course.calamity
        if not run.is_alive or piece.at is not SiteState.RUNNING:
            return
        run.hit_by = calamity
        self._world.tell(calamity, run.key)
        if calamity in ("oom", "preempted", "scancel"):
            self._finish(piece, run, "137", _AT[calamity])
            return
        run.is_supervised = calamity in ("orphaned", "forgotten")
        if run.is_supervised:
            self._look_for_loss(piece, run)
        else:
            self._kill(run)
        if calamity == "forgotten":
            del self.pieces[piece.mark]
            self._schedule()
        else:
            self._over(piece, _AT[calamity], 137 if calamity == "supervisor" else None)

    def _look_for_loss(self, piece: Piece, run: Run) -> None:
        if run.is_alive and os.path.exists(f"{piece.path}.lost"):
            run.is_supervised = False
            self._kill(run)
        elif run.is_alive:
            self._world.after(_LOOK_FOR_LOSS_S, lambda: self._look_for_loss(piece, run))


def _id(piece: Piece) -> str:
    return f"{piece.mark[0]}_{piece.mark[1]}"
