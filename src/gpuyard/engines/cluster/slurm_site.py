"""Slurm as a site: runs its commands, and remembers of jobs what Slurm forgets.

A command has a session of its own and a time limit; past that it is killed with its children. It may have been done
then, and the next look tells.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gpuyard.core.cluster.offer import Offer
from gpuyard.engines.cluster import slurm_commands as commands
from gpuyard.engines.cluster.site import (
    OVER,
    ClusterSubmission,
    Mark,
    Sighting,
    Site,
    SiteRefused,
    SiteReport,
    SiteState,
    SiteUnreachable,
)
from gpuyard.engines.cluster.slurm_commands import SlurmJobRow, SlurmLimits, SlurmSettings
from gpuyard.engines.cluster.slurm_text import fault_of, unanswered

_LIMIT_S = 30.0
_REAP_S = 1.0
_ACCOUNTS_REST_S = 600.0


class SlurmSite(Site):
    """For one thread."""

    def __init__(self, settings: SlurmSettings, *, limit_s: float = _LIMIT_S) -> None:
        self._settings = settings
        self._limit_s = limit_s
        self._limits: SlurmLimits | None = None
        self._jobs: dict[str, str] = {}  # of a token, Slurm's number
        self._keeps_comments = False
        self._over: dict[Mark, Sighting] = {}
        self._waiting: dict[Mark, Sighting] = {}
        self._looked_at = 0.0
        self._ask_accounts_at = 0.0

    @property
    def name(self) -> str:
        return "slurm"

    @property
    def most_in_parcel(self) -> int:
        return self._learned_limits().most_in_array

    def submit(self, parcel: ClusterSubmission) -> str:
        script = commands.script(parcel).encode("utf-8", "surrogateescape")
        said = self._run(commands.submission(parcel, self._settings), {}, script)
        job = commands.parse_submission(said.decode("utf-8", "replace"))
        if job is None and not said.strip():
            raise SiteRefused("sbatch took nothing, and said nothing", hint="is one of its options --test-only?")
        if job is None:
            raise SiteUnreachable(f"sbatch did not say the job's number, but: {said[:200]!r}")
        self._jobs[parcel.token] = job
        return job

    def look(self, live: Sequence[ClusterSubmission]) -> SiteReport:
        rows = commands.parse_listing(self._ask(commands.listing(os.getuid())))
        parcels = {parcel.token: parcel for parcel in live}
        self._keep_only(parcels)
        self._learn_jobs(rows, parcels)
        found = dict(self._listed(rows, parcels))
        unseen = {mark for mark in _marks_of(live) if mark not in found and mark not in self._over}
        self._over.update((mark, each) for mark, each in found.items() if each.at in OVER)
        self._over.update(self._cancelled(unseen, rows))
        self._over.update(self._from_accounts(unseen - self._over.keys(), parcels))
        self._waiting = {mark: each for mark, each in found.items() if each.at is SiteState.PENDING}
        self._looked_at = time.monotonic()
        return SiteReport(sightings={**self._over, **found}, offer=self._offer())

    def cancel(self, ids: Sequence[str]) -> None:
        for words in commands.cancelling(ids):
            self._ask(words)

    def output(self, sighting: Sighting) -> None:  # noqa: ARG002 - it is in the parcel's folder
        return None

    # What is remembered

    def _keep_only(self, parcels: Mapping[str, ClusterSubmission]) -> None:
        self._jobs = {token: job for token, job in self._jobs.items() if token in parcels}
        self._over = {mark: each for mark, each in self._over.items() if mark[0] in parcels}

    def _learn_jobs(self, rows: Sequence[SlurmJobRow], parcels: Mapping[str, ClusterSubmission]) -> None:
        self._jobs = {**{each.token: each.known_as for each in parcels.values() if each.known_as}, **self._jobs}
        for row in rows:
            if row.token is not None and row.token in parcels:
                self._jobs.setdefault(row.token, row.job)

    def _listed(
        self, rows: Sequence[SlurmJobRow], parcels: Mapping[str, ClusterSubmission]
    ) -> Iterator[tuple[Mark, Sighting]]:
        """By their comments: a cluster that was set up anew gives our numbers to others. Where a site puts words of its
        own in place of every comment there are only the numbers."""
        self._keeps_comments = self._keeps_comments or any(row.token is not None for row in rows)
        ours = (row for row in rows if row.token is not None) if self._keeps_comments else rows
        return self._marked(ours, parcels)

    def _marked(
        self, rows: Iterable[SlurmJobRow], parcels: Mapping[str, ClusterSubmission]
    ) -> Iterator[tuple[Mark, Sighting]]:
        tokens = {job: token for token, job in self._jobs.items()}
        for row in rows:
            parcel = parcels.get(tokens.get(row.job, ""))
            if parcel is None:
                continue
            number = row.number if parcel.count > 1 else 0
            if number is not None:
                yield (parcel.token, number), row.sighting

    def _cancelled(self, unseen: set[Mark], rows: Sequence[SlurmJobRow]) -> Iterator[tuple[Mark, Sighting]]:
        """Those that waited a moment ago: had they run, they would still be listed, as others of their array are."""
        listed = {row.job for row in rows}
        away_s = time.monotonic() - self._looked_at
        for mark in unseen & self._waiting.keys():
            if self._jobs.get(mark[0]) in listed and away_s < self._learned_limits().listed_for_s / 2:
                yield (
                    mark,
                    Sighting(id=self._waiting[mark].id, at=SiteState.CANCELLED, reason="it was cancelled as it waited"),
                )

    def _from_accounts(
        self, unseen: set[Mark], parcels: Mapping[str, ClusterSubmission]
    ) -> Iterator[tuple[Mark, Sighting]]:
        """What is not listed any more is over, and it is good to know how; where there are no accounts nobody does."""
        jobs = {self._jobs[token] for token, _ in unseen if token in self._jobs}
        if not jobs or time.monotonic() < self._ask_accounts_at:
            return
        try:
            said = self._ask(commands.accounting(jobs))
        except SiteUnreachable:
            self._ask_accounts_at = time.monotonic() + _ACCOUNTS_REST_S
            return
        rows = commands.parse_accounting(said.decode("utf-8", "replace"))
        yield from ((mark, each) for mark, each in self._marked(rows, parcels) if mark in unseen)

    def _learned_limits(self) -> SlurmLimits:
        if self._limits is None:
            try:
                said = self._ask(commands.configuration())
            except SiteUnreachable:
                return SlurmLimits()
            self._limits = commands.parse_configuration(said.decode("utf-8", "replace"))
        return self._limits

    def _offer(self) -> Offer:
        return Offer(most_jobs=self._settings.most_jobs, card_mb=self._settings.card_mb)

    # Running commands

    def _ask(self, words: Sequence[str]) -> bytes:
        return self._run(words, {"SLURM_TIME_FORMAT": "%s"})

    def _run(self, words: Sequence[str], more: Mapping[str, str], given: bytes = b"") -> bytes:
        """What it printed."""
        program = words[0]
        process = _started(words, {**commands.environment(os.environ), **more})
        try:
            printed, said = process.communicate(given, timeout=self._limit_s)
        except subprocess.TimeoutExpired as error:
            so_far = (error.stderr or b"").decode("utf-8", "replace")
            raise unanswered(program, self._limit_s, so_far) from error
        finally:
            _end(process)
        fault = fault_of(program, process.returncode, said.decode("utf-8", "replace")) if process.returncode else None
        if fault is not None:
            raise fault
        return printed


def _started(words: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(
            words, env=environment, cwd="/", stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
    except FileNotFoundError as error:
        raise SiteUnreachable(
            f"there is no {words[0]} on PATH", hint="start the daemon where Slurm's commands are"
        ) from error
    except OSError as error:
        raise SiteUnreachable(f"{words[0]} cannot start: {error.strerror}") from error
    except ValueError as error:
        raise SiteRefused(f"{words[0]} cannot be given such options: {error}") from error


def _end(process: subprocess.Popen[bytes]) -> None:
    """Whatever it was cut short by, nothing is left of it."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_REAP_S)


def _marks_of(parcels: Sequence[ClusterSubmission]) -> Iterator[Mark]:
    return ((parcel.token, number) for parcel in parcels for number in range(parcel.count))
