"""The outpost: the queue's man at a site. It hands parcels over, asks how they stand, and tells the controller.

Whatever may take time is done by a thread of its own; the controller's calls never wait.

- What was prepared in one step on the same terms is one parcel, and one call of the site's.
- A parcel that the site may or may not have taken is looked for: what is not there is kept from ever beginning, and was
  never begun. So nothing runs twice, whenever a daemon or a call dies.
- One look at the site is for all parcels, and there is none while there are none. Ends are also seen by the files that
  supervisors leave, which costs the site nothing.
- Where the site cannot be reached, everything waits until it can.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from msgspec.structs import replace

from gpuyard.core.cluster.offer import ClusterTerms, Offer, amount_needed, subtract
from gpuyard.core.job.job import Attempt, Outcome, OutcomeKind
from gpuyard.engines.argument_checks import check_arguments
from gpuyard.engines.cluster.in_flight import InFlightJobs, fill, key_of
from gpuyard.engines.cluster.site import Site, SiteReport, SiteUnreachable
from gpuyard.engines.cluster.submission_dir import SubmissionDirs
from gpuyard.engines.local import job_logs
from gpuyard.errors import EnvironmentFault
from gpuyard.ports import Ended, Launch, Prepared, SiteStatus

_log = logging.getLogger(__name__)
_TICK_S = 1.0
_SOON_S, _FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 1.0, 30.0
_SLOWER = 1.5
_CLOSED_WITHIN_S = 2.0


class ClusterEngine:
    """Implements `ports.Engine`, for one thread of one process. `on_news` may be called from any thread."""

    def __init__(self, site: Site, folder: Path, on_news: Callable[[], None], *, poll_s: float = 10.0) -> None:
        """`folder` is one that the site's nodes see; logs are kept there as well. Nothing is made there until there is
        work: a network that is not there yet comes later."""
        self._site = site
        self._folder = folder
        self._on_news = on_news
        self._poll_s = poll_s
        self._parcels = SubmissionDirs(folder / site.name)
        self._has_folders = False
        self._prepared: list[Launch] = []
        self._lock = threading.Lock()  # for what follows, up to the thread
        self._to_send: list[Launch] = []
        self._to_adopt: list[Attempt] = []
        self._to_cancel: set[str] = set()
        self._has_new_to_cancel = False
        self._promised: dict[str, ClusterTerms] = {}
        self._live: set[str] = set()
        self._over: list[Ended] = []
        self._told: list[str] = []
        self._recorded: list[str] = []
        self._seen: list[SiteStatus] = []
        self._first_offer = self._offer = Offer(trouble=f"{site.name} is being asked whether it is there")
        self._is_wanted = False
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._bell = threading.Event()
        self._cargo = InFlightJobs(site, self._parcels)  # the thread's own, as is all that follows
        self._look_at: float | None = 0.0
        self._interval_s = _FIRST_PAUSE_S
        self._news = False
        self._explained: dict[str, str] = {}  # why each launch that is not sent yet has to wait

    # What the controller calls

    def prepare(self, launch: Launch, lease_descriptor: int | None) -> Prepared:  # noqa: ARG002 - leases are of devices here
        check_arguments(launch, launch.environment)
        self._make_folders()
        self._prepared.append(launch)
        return Prepared(job_id=launch.job_id, attempt=launch.attempt, pid=0, log=self._log_of(launch))

    def _make_folders(self) -> None:
        """Before anything is recorded as handed over: where they are missing later, they are out of reach."""
        for path in () if self._has_folders else (self._folder / "logs", Path(self._parcels.path(""))):
            try:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise EnvironmentFault(f"the folder {path} cannot be made: {error.strerror}") from error
        self._has_folders = True

    def _log_of(self, launch: Launch) -> str:
        return str(self._folder / "logs" / job_logs.name_of(launch.job_id, launch.attempt))

    def start_prepared(self) -> None:
        if not self._prepared:
            return
        with self._lock:
            self._to_send += self._prepared
            self._live.update(map(key_of, self._prepared))
            self._promised |= {key_of(each): each.terms for each in self._prepared if each.terms is not None}
        self._prepared = []
        self._ring()

    def discard_prepared(self) -> None:
        self._prepared.clear()

    def adopt(self, attempts: Sequence[Attempt]) -> None:
        with self._lock:
            self._to_adopt += attempts
            self._live.update(attempt.key for attempt in attempts)
        self._ring()

    def ended(self) -> list[Ended]:
        """Ask again only when what was told is recorded: its parcel may be gone then."""
        with self._lock:
            over, self._over = self._over, []
            has_recorded = bool(self._told)
            self._recorded += self._told
            self._told = [f"{each.job_id}.{each.attempt}" for each in over]
            self._live.difference_update(self._told)
        if has_recorded:
            self._ring()
        return over

    def site_changes(self) -> list[SiteStatus]:
        with self._lock:
            seen, self._seen = self._seen, []
        return seen

    def offer(self) -> Offer:
        with self._lock:
            self._is_wanted = True
            offer, promised = self._offer, list(self._promised.values())
        if self._thread is None or offer.free is not None:
            self._ring()
        for terms in promised:
            if offer.free is not None:
                offer = replace(offer, free=subtract(offer.free, amount_needed(terms, offer.card_mb)))
        return offer

    def signal(self, attempt: Attempt, signum: int) -> int:  # noqa: ARG002 - a site ends what it is told to in its own way
        with self._lock:
            if attempt.key not in self._live:
                return 0
            self._to_cancel.add(attempt.key)
            self._has_new_to_cancel = True
        self._ring()
        return 1

    def close(self) -> None:
        """What was handed over goes on."""
        self._is_closed = True
        self._bell.set()
        if self._thread is not None:
            self._thread.join(_CLOSED_WITHIN_S)

    def _ring(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"gpuyard-{self._site.name}", daemon=True)
            self._thread.start()
        self._bell.set()

    # The thread

    def _run(self) -> None:
        while not self._is_closed:
            self._bell.clear()
            self._turn()
            self._bell.wait(self._rest_s())

    def _turn(self) -> None:
        try:
            self._work()
        except EnvironmentFault as error:
            self._suffer(error)
        except Exception as error:  # noqa: BLE001 - the outermost place: nothing would be heard any more
            _log.exception("the outpost at %s failed", self._site.name)
            self._suffer(EnvironmentFault(f"a bug: {type(error).__name__}: {error}"))
        if self._news:
            self._news = False
            self._on_news()

    def _rest_s(self) -> float | None:
        waits = [] if self._look_at is None else [max(0.0, self._look_at - time.monotonic())]
        if self._cargo.has_live:
            waits.append(_TICK_S)
        return min(waits, default=None)

    def _work(self) -> None:
        self._forget_recorded()
        self._take_over()
        self._send()
        self._cancel_new()
        fault = self._settle()
        if self._cargo.wants_sample:
            self._look_within(0.0)
        with self._lock:
            is_wanted = self._is_wanted
        if is_wanted and self._offer.free is not None:
            self._look_within(self._interval_s)
        if self._look_at is not None and time.monotonic() >= self._look_at:
            self._look()
        if fault is not None:
            raise fault

    def _settle(self) -> EnvironmentFault | None:
        """What keeps some of the files from being read keeps nobody from asking the site."""
        try:
            self._tell(self._cargo.settle())
        except EnvironmentFault as fault:
            return fault
        return None

    def _forget_recorded(self) -> None:
        """First of all: what was never begun may be handed over anew, by the same name."""
        with self._lock:
            recorded, self._recorded = self._recorded, []
        self._cargo.forget(recorded)

    def _take_over(self) -> None:
        with self._lock:
            attempts = list(self._to_adopt)
        if attempts:
            self._tell(self._cargo.adopt(attempts))
            self._look_within(0.0)
            with self._lock:
                del self._to_adopt[: len(attempts)]

    def _send(self) -> None:
        with self._lock:
            launches, self._to_send = self._to_send, []
            cancelled = set(self._to_cancel)
        withdrawn = [launch for launch in launches if key_of(launch) in cancelled]
        self._tell(_unbegun(launch, "it was taken back before it was handed over") for launch in withdrawn)
        launches = [launch for launch in launches if key_of(launch) not in cancelled]
        try:
            while launches and self._offer.trouble is None:  # else each is tried in vain, and for a long time
                some, others = fill(launches, self._site.most_in_parcel)
                launches = others
                self._hand_over(some)
        finally:
            with self._lock:
                self._to_send = launches + self._to_send
        self._explain(launches)

    def _explain(self, unsent: Sequence[Launch]) -> None:
        """Report the site's trouble once, as the reason of each launch that waits for the site to come back."""
        if self._offer is self._first_offer:
            return
        reasons = {key_of(launch): self._offer.trouble or "" for launch in unsent}
        new = [launch for launch in unsent if self._explained.get(key_of(launch)) != reasons[key_of(launch)]]
        self._explained = reasons
        self._tell(_waiting(launch, reasons[key_of(launch)]) for launch in new)

    def _hand_over(self, launches: Sequence[Launch]) -> None:
        self._look_within(_SOON_S)
        try:
            self._cargo.send(launches, [self._log_of(launch) for launch in launches])
        except SiteUnreachable as error:
            self._suffer(error)
        except EnvironmentFault as error:  # it was refused, or its folder cannot be written
            self._tell(_unbegun(launch, _with_hint(error)) for launch in launches)
        except Exception as error:
            # A bug, of ours or of the site's: what the site may have taken is looked for, and all else was never begun.
            why = f"a bug: {type(error).__name__}: {error}"
            self._tell(_unbegun(launch, why) for launch in launches if not self._cargo.has(key_of(launch)))
            raise

    def _cancel_new(self) -> None:
        with self._lock:
            is_new, self._has_new_to_cancel = self._has_new_to_cancel, False
        if is_new:
            self._look_within(_SOON_S)
            self._cancel()

    def _cancel(self) -> None:
        """Those that are left over are tried again after the next look, which tells whether the site is there at all:
        it may not have shown them yet."""
        with self._lock:
            wanted = set(self._to_cancel)
        if not wanted:
            return
        try:
            done = self._cargo.cancel(wanted)
        except SiteUnreachable as error:
            _log.warning("what is to end at %s is asked for again: %s", self._site.name, error)
            return
        self._look_within(_SOON_S)
        with self._lock:
            coming = {*map(key_of, self._to_send), *(attempt.key for attempt in self._to_adopt)}
            self._to_cancel -= done - coming

    # Looking

    def _look_within(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self._look_at = at if self._look_at is None else min(self._look_at, at)

    def _look(self) -> None:
        with self._lock:
            shown = self._promised.keys() - set(map(key_of, self._to_send))
        try:
            report = self._cargo.look()
        except SiteUnreachable as error:
            self._suffer(error)
            return
        with self._lock:
            is_wanted, self._is_wanted = self._is_wanted, False
        has_changed = self._note(report, shown) | self._tell(self._cargo.settle(report))
        self._news = self._news or (is_wanted and report.offer.free is not None)
        self._interval_s = _FIRST_PAUSE_S if has_changed else min(self._poll_s, self._interval_s * _SLOWER)
        has_work = self._cargo.has_live or bool(self._to_cancel or self._to_send)
        self._look_at = time.monotonic() + self._interval_s if has_work else None
        self._cancel()

    def _note(self, report: SiteReport, shown: Iterable[str]) -> bool:
        """What the site offers; what it was given before that it knows of."""
        with self._lock:
            before, self._offer = self._offer, report.offer
            for key in shown:
                self._promised.pop(key, None)
        if before.trouble is not None and report.offer.trouble is None:
            self._news = True
        return before != report.offer

    def _suffer(self, error: EnvironmentFault) -> None:
        """It cannot be reached, or its folder cannot be: nothing changes until it can."""
        trouble = (
            f"{self._site.name} cannot be reached: {_with_hint(error)}; "
            f"tried again every {_LONGEST_PAUSE_S:.0f} s or so"
        )
        with self._lock:
            is_new, self._offer = self._offer.trouble != trouble, Offer(trouble=trouble)
            is_awaited = self._is_wanted or bool(self._to_send or self._to_adopt or self._to_cancel)
            self._news = self._news or self._is_wanted
            self._is_wanted = False  # whoever still waits asks again
        if is_new:
            _log.warning("%s", trouble)
            self._news = True
            self._tell(self._cargo.excuse(trouble))
        self._interval_s = min(_LONGEST_PAUSE_S, self._interval_s * 2)
        has_reason = is_awaited or self._cargo.has_live
        self._look_at = time.monotonic() + self._interval_s if has_reason else None

    def _tell(self, words: Iterable[SiteStatus | Ended]) -> bool:
        """Whether there were any; one after the other, as what was told is told whatever goes wrong with the next."""
        has_told = False
        for each in words:
            with self._lock:
                if isinstance(each, SiteStatus):
                    self._seen.append(each)
                else:
                    self._over.append(each)
            self._news = has_told = True
        return has_told


def _with_hint(error: EnvironmentFault) -> str:
    return f"{error} ({error.hint})" if error.hint else str(error)


def _waiting(launch: Launch, reason: str) -> SiteStatus:
    return SiteStatus(job_id=launch.job_id, attempt=launch.attempt, site_id="", reason=reason)


def _unbegun(launch: Launch, reason: str) -> Ended:
    outcome = Outcome(kind=OutcomeKind.NEVER_STARTED, reason=reason)
    return Ended(job_id=launch.job_id, attempt=launch.attempt, outcome=outcome)
