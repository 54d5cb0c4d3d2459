"""The cluster engine: submits jobs to a site, asks the site for reports, and reports to the controller.

A thread does everything that may take time; the controller's calls never wait. If it is unknown whether the site took a
submission, the next report shows it: an element that is not there is kept from ever starting. So nothing runs twice,
whenever a daemon or a call dies. While the site cannot be reached, everything waits."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from msgspec.structs import replace

from gpuyard.engines.cluster.in_flight import InFlightJobs, split_launches
from gpuyard.engines.cluster.site import Site, SiteUnreachable
from gpuyard.engines.cluster.submission_dir import SubmissionDirs
from gpuyard.engines.common import job_logs
from gpuyard.engines.common.bring_results import SnapshotResults
from gpuyard.engines.common.program_outcome import check_arguments
from gpuyard.errors import EnvironmentFault
from gpuyard.model.cluster_terms import ClusterTerms, Offer, amount_needed, subtract
from gpuyard.model.job import Attempt, Outcome, OutcomeKind
from gpuyard.output.progress_line import VARIABLE as PROGRESS_VARIABLE
from gpuyard.ports import Ended, Launch, Prepared, SiteStatus

_log = logging.getLogger(__name__)
_TICK_S = 1.0
_SOON_S, _FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 1.0, 30.0


class ClusterEngine:
    """Implements `ports.Engine`, for one thread of one process. Calls `on_news` from any thread."""

    def __init__(self, site: Site, folder: Path, on_news: Callable[[], None], *, poll_s: float = 10.0) -> None:
        """`folder` is visible to nodes and holds the logs. It is created when there is work: it may be mounted late."""
        self._site, self._folder, self._on_news, self._poll_s = site, folder, on_news, poll_s
        self._submissions = SubmissionDirs(folder / site.name)
        self._has_folders = False
        self._prepared: list[Launch] = []
        self._lock = threading.Lock()  # guards all attributes from here to the thread
        self._to_send: list[Launch] = []
        self._to_adopt: list[Attempt] = []
        self._to_end: dict[str, bool] = {}  # attempts to end, and whether only those that have not begun
        self._promised: dict[str, ClusterTerms] = {}
        self._live: set[str] = set()
        self._over: list[Ended] = []
        self._returned: list[str] = []
        self._recorded: list[str] = []
        self._changes: list[SiteStatus] = []
        self._first_offer = self._offer = Offer(trouble=f"waiting for a first answer from {site.name}")
        self._is_wanted = False
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._wakeup = threading.Event()
        self._in_flight = InFlightJobs(site, self._submissions)  # only the thread uses this and all that follow
        self._ask_at: float | None = 0.0
        self._interval_s = _FIRST_PAUSE_S
        self._has_news = False
        self._results = SnapshotResults(self._wakeup.set)
        self._held: list[Ended] = []  # ends whose results are being brought back
        self._explained: dict[str, str] = {}  # why each launch that is not submitted yet has to wait

    def prepare(self, launch: Launch, lease_descriptor: int | None) -> Prepared:  # noqa: ARG002 - leases are for local devices
        progress = {PROGRESS_VARIABLE: job_logs.progress_file_of(self._folder / "logs", launch.key)}
        launch = replace(launch, environment={**launch.environment, **progress})
        check_arguments(launch, launch.environment)
        # The folders exist before a job is recorded as submitted: if they are missing later, they are unreachable. That
        # no other user can write there is checked before each job: nodes execute what is in them.
        (self._submissions.check if self._has_folders else self._submissions.make)(self._folder / "logs")
        self._has_folders = True
        self._prepared.append(launch)
        paths = [path for path, _ in job_logs.outputs_of(self._log_of(launch), launch)]
        error_log = paths[1] if len(paths) > 1 else None
        return Prepared(job_id=launch.job_id, attempt=launch.attempt, log=paths[0], error_log=error_log)

    def _log_of(self, launch: Launch) -> str:
        return f"{self._folder}/logs/{job_logs.name_of(launch.job_id, launch.attempt)}"

    def start_prepared(self) -> None:
        if not self._prepared:
            return
        with self._lock:
            self._to_send += self._prepared
            self._live.update(launch.key for launch in self._prepared)
            self._promised |= {each.key: each.terms for each in self._prepared if each.terms is not None}
        self._prepared = []
        self._wake()

    def discard_prepared(self) -> None:
        self._prepared.clear()

    def adopt(self, attempts: Sequence[Attempt]) -> None:
        with self._lock:
            self._to_adopt += attempts
            self._live.update(attempt.key for attempt in attempts)
        self._wake()

    def ended(self) -> list[Ended]:
        """Call it again only when the results are recorded: their submissions may be removed then."""
        with self._lock:
            over, self._over = self._over, []
            has_recorded = bool(self._returned)
            self._recorded += self._returned
            self._returned = [f"{each.job_id}.{each.attempt}" for each in over]
            self._live.difference_update(self._returned)
        if has_recorded:
            self._wake()
        return over

    def site_changes(self) -> list[SiteStatus]:
        with self._lock:
            seen, self._changes = self._changes, []
        return seen

    def offer(self) -> Offer:
        with self._lock:
            self._is_wanted = True
            offer, promised = self._offer, list(self._promised.values())
        if self._thread is None or offer.free is not None:
            self._wake()
        for terms in promised:
            if offer.free is not None:
                offer = replace(offer, free=subtract(offer.free, amount_needed(terms, offer.card_mb)))
        return offer

    def signal(self, attempt: Attempt, signum: int) -> int:  # noqa: ARG002 - a site ends jobs by signals of its own
        return self._request_end(attempt, only_waiting=False)

    def withdraw(self, attempt: Attempt) -> None:
        self._request_end(attempt, only_waiting=True)

    def _request_end(self, attempt: Attempt, *, only_waiting: bool) -> int:
        with self._lock:
            if attempt.key not in self._live:
                return 0
            self._to_end[attempt.key] = only_waiting and self._to_end.get(attempt.key, True)
        self._wake()
        return 1

    def close(self) -> None:
        self._is_closed = True
        self._wakeup.set()
        if self._thread is not None:
            self._thread.join(2.0)

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"gpuyard-{self._site.name}", daemon=True)
            self._thread.start()
        self._wakeup.set()

    def _run(self) -> None:
        while not self._is_closed:
            self._wakeup.clear()
            self._run_once()
            self._wakeup.wait(self._pause_s())

    def _pause_s(self) -> float | None:
        waits_s = [] if self._ask_at is None else [max(0.0, self._ask_at - time.monotonic())]
        return min([*waits_s, *([_TICK_S] if self._in_flight.live or self._held else [])], default=None)

    def _run_once(self) -> None:
        try:
            self._work()
        except EnvironmentFault as error:
            self._note_trouble(error)
        except Exception as error:  # noqa: BLE001 - the site may be a plugin's
            _log.exception("the cluster engine for %s failed", self._site.name)
            self._note_trouble(EnvironmentFault(f"a bug: {type(error).__name__}: {error}"))
        if self._has_news:
            self._has_news = False
            self._on_news()

    def _work(self) -> None:
        with self._lock:
            recorded, self._recorded = self._recorded, []
            to_adopt = list(self._to_adopt)
        self._in_flight.forget(recorded)  # first: an attempt that never started may be submitted again under its key
        if to_adopt:
            self._publish(self._in_flight.adopt(to_adopt))
            self._ask_within(0.0)
            with self._lock:
                del self._to_adopt[: len(to_adopt)]
        self._submit_all()
        try:
            self._end_requested()
            self._publish(self._in_flight.collect())
        finally:  # also if files cannot be read
            if self._in_flight.wants_report:
                self._ask_within(0.0)
            with self._lock:
                is_wanted = self._is_wanted
            if is_wanted and self._offer.free is not None:
                self._ask_within(self._interval_s)
            if self._ask_at is not None and time.monotonic() >= self._ask_at:
                self._ask_site()

    def _submit_all(self) -> None:
        with self._lock:
            launches, self._to_send = self._to_send, []
            cancelled = set(self._to_end)
        for launch in launches:
            self._results.note(launch)
        withdrawn = [launch for launch in launches if launch.key in cancelled]
        self._publish(_never_started(launch, "it was withdrawn before it was submitted") for launch in withdrawn)
        launches = [launch for launch in launches if launch.key not in cancelled]
        try:
            while launches and self._offer.trouble is None:  # else each call would fail, after a long time
                # A site that counts what is free was promised each job's own amounts.
                merges, most = self._offer.free is None, self._site.most_in_submission
                batch, launches = split_launches(launches, most, merges_learned=merges)
                self._submit(batch)
        finally:
            with self._lock:
                self._to_send = launches + self._to_send
        if self._offer is not self._first_offer:
            # Report the site's trouble once, as the reason of each launch that waits for the site to come back.
            before, self._explained = self._explained, {each.key: self._offer.trouble or "" for each in launches}
            self._publish(
                SiteStatus(job_id=each.job_id, attempt=each.attempt, site_id="", reason=self._explained[each.key])
                for each in launches
                if before.get(each.key) != self._explained[each.key]
            )

    def _submit(self, launches: Sequence[Launch]) -> None:
        self._ask_within(_SOON_S)
        try:
            self._in_flight.send([(launch, self._log_of(launch)) for launch in launches])
        except SiteUnreachable as error:
            self._note_trouble(error)
        except EnvironmentFault as error:  # the site refused it, or its folder cannot be written
            self._publish(_never_started(launch, error.with_hint) for launch in launches)
        except Exception as error:
            # The site may be a plugin's. The next report shows what it took; all else never started.
            why = f"a bug: {type(error).__name__}: {error}"
            self._publish(_never_started(launch, why) for launch in launches if launch.key not in self._in_flight.live)
            raise

    def _end_requested(self) -> None:
        """End the requested elements at the site. What fails, or is not reported yet, is tried after the next
        report."""
        with self._lock:
            requested = dict(self._to_end)
        ended, done = self._in_flight.end(requested)
        self._publish(ended)
        with self._lock:
            coming = {*(launch.key for launch in self._to_send), *(attempt.key for attempt in self._to_adopt)}
            for key in done - coming:
                if self._to_end[key] is requested[key]:  # else it was cancelled meanwhile
                    del self._to_end[key]
        if self._offer.trouble is not None and not done:
            return
        if requested:
            self._ask_within(_SOON_S)  # for their ends; others may have begun
        try:
            self._in_flight.cancel_ended()
        except SiteUnreachable as error:
            _log.warning("cancelling at %s is tried again: %s", self._site.name, error)

    def _ask_within(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self._ask_at = at if self._ask_at is None else min(self._ask_at, at)

    def _ask_site(self) -> None:
        with self._lock:
            shown = self._promised.keys() - {launch.key for launch in self._to_send}
        try:
            report = self._in_flight.ask_site()
        except SiteUnreachable as error:
            self._note_trouble(error)
            return
        with self._lock:
            is_wanted, self._is_wanted = self._is_wanted, False
            before, self._offer = self._offer, report.offer
            for key in shown:  # the offer takes these into account
                self._promised.pop(key, None)
        if before.trouble is not None and report.offer.trouble is None:
            self._has_news = True
        has_changed = self._publish(self._in_flight.collect(report)) or before != report.offer
        self._has_news = self._has_news or (is_wanted and report.offer.free is not None)
        self._interval_s = _FIRST_PAUSE_S if has_changed else min(self._poll_s, self._interval_s * 2)
        has_work = bool(self._in_flight.live or self._in_flight.to_cancel or self._to_end or self._to_send)
        self._ask_at = time.monotonic() + self._interval_s if has_work else None
        self._end_requested()

    def _note_trouble(self, error: EnvironmentFault) -> None:
        trouble = (
            f"{self._site.name} cannot be reached: {error.with_hint}; tried again about every {_LONGEST_PAUSE_S:.0f} s"
        )
        with self._lock:
            is_new, self._offer = self._offer.trouble != trouble, Offer(trouble=trouble)
            is_awaited = self._is_wanted or bool(self._to_send or self._to_adopt or self._to_end)
            self._has_news = self._has_news or self._is_wanted
            self._is_wanted = False  # the controller asks again if it still needs an offer
        if is_new:
            _log.warning("%s", trouble)
            self._has_news = True
            self._publish(self._in_flight.report_trouble(trouble))
        self._interval_s = min(_LONGEST_PAUSE_S, self._interval_s * 2)
        has_reason = is_awaited or self._in_flight.to_cancel or self._in_flight.live
        self._ask_at = time.monotonic() + self._interval_s if has_reason else None

    def _publish(self, changes: Iterable[SiteStatus | Ended]) -> bool:
        """Add the changes one by one, so that an error keeps those before it. Return whether there were any."""
        has_changed = False
        for change in changes:
            if isinstance(change, SiteStatus):
                with self._lock:
                    self._changes.append(change)
            else:
                self._held.append(change)
            self._has_news = has_changed = True
        held, self._held = self._held, []
        for ended in held:
            key = f"{ended.job_id}.{ended.attempt}"
            if self._results.holds(key):
                self._held.append(ended)
                continue
            with self._lock:
                self._over.append(replace(ended, unbrought=self._results.take_problem(key)))
            self._has_news = True
        return has_changed


def _never_started(launch: Launch, reason: str) -> Ended:
    outcome = Outcome(kind=OutcomeKind.NEVER_STARTED, reason=reason)
    return Ended(job_id=launch.job_id, attempt=launch.attempt, outcome=outcome)
