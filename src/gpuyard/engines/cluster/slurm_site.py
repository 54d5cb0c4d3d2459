"""Slurm as a site: runs its commands, and remembers ended jobs, which Slurm forgets.

Each command has a session of its own and a timeout, after which it is killed with its children. Slurm may have carried
out the request by then; the next report shows it.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gpuyard.config import SlurmConfig
from gpuyard.engines.cluster import slurm_commands as commands
from gpuyard.engines.cluster.site import (
    OVER,
    ClusterNode,
    ClusterSubmission,
    ElementRef,
    Sighting,
    SiteRefused,
    SiteReport,
    SiteState,
    SiteUnreachable,
)
from gpuyard.engines.cluster.slurm_commands import SlurmJobRow, SlurmLimits
from gpuyard.model.cluster_terms import ClusterTerms, Offer, amount_needed, impossible
from gpuyard.model.job import SiteRequest
from gpuyard.system.run_command import NotInTime, run_command

_LIMIT_S = 30.0


class SlurmSite:
    name = "slurm"

    def __init__(self, settings: SlurmConfig, *, limit_s: float | None = None) -> None:
        self._settings = settings
        self._limit_s = limit_s or _LIMIT_S
        self._limits: SlurmLimits | None = None
        self._jobs: dict[str, str] = {}  # Slurm's job number by token
        self._keeps_comments = False
        self._over: dict[ElementRef, Sighting] = {}
        self._waiting: dict[ElementRef, Sighting] = {}
        self._reported_at = 0.0
        self._ask_accounting_at = 0.0

    @property
    def most_in_submission(self) -> int:
        return self._site_limits().most_in_array

    def submit(self, submission: ClusterSubmission) -> str:
        script = commands.script(submission).encode("utf-8", "surrogateescape")
        printed = self._run(commands.submit_command(submission, self._settings), {}, script)
        job = commands.parse_submission(printed.decode("utf-8", "replace"))
        if job is None and not printed.strip():
            raise SiteRefused("sbatch submitted and printed nothing", hint="is one of its options --test-only?")
        if job is None:
            raise SiteUnreachable(f"sbatch did not print the job's number, but: {printed[:200]!r}")
        self._jobs[submission.token] = job
        return job

    def request(self, submission: ClusterSubmission, number: int) -> SiteRequest:  # noqa: ARG002 - one for all
        return commands.request_of(submission, self._settings)

    def check(self, terms: ClusterTerms) -> None:
        """Raise SiteRefused if Slurm can never take a job on these terms."""
        try:
            self._run(commands.test_command(terms, self._settings), {}, b"#!/bin/sh\n")
        except SiteRefused as error:
            if commands.is_about_nodes(error):
                printed = self._ask(commands.nodes_command(terms, self._settings)).decode("utf-8", "replace")
                nodes = commands.parse_nodes(printed, terms.need.model)
                if never := impossible("slurm", nodes, amount_needed(terms, self._settings.card_mb)):
                    kind = "" if terms.need.model is None else f" (GPUs named {terms.need.model})"
                    hint = "ask for less; `sinfo --Node --long` lists the nodes"
                    raise SiteRefused(f"{never}{kind}", hint=hint) from error
            elif commands.is_for_ever(error):
                raise SiteRefused(f"Slurm refuses it: {error}", hint="`sinfo` lists partitions and nodes") from error

    def report(self, live: Sequence[ClusterSubmission]) -> SiteReport:
        rows = commands.parse_listing(self._ask(commands.list_command(os.getuid())))
        submissions = {submission.token: submission for submission in live}
        listed = {row.token: row.job for row in reversed(rows) if row.token is not None}
        submitted = {each.token: each.known_as for each in submissions.values() if each.known_as}
        jobs = {**listed, **submitted, **self._jobs}
        self._jobs = {token: job for token, job in jobs.items() if token in submissions}
        # Find elements by their comments: a cluster that was reinstalled gives our job numbers to others. If a site
        # replaces all comments by text of its own, there are only the numbers.
        self._keeps_comments = self._keeps_comments or any(row.token is not None for row in rows)
        ours = [row for row in rows if row.token is not None or not self._keeps_comments]
        found = dict(self._sightings(ours, submissions))
        self._over = {ref: each for ref, each in self._over.items() if ref[0] in submissions}
        refs = ((submission.token, number) for submission in live for number in range(submission.count))
        unseen = {ref for ref in refs if ref not in found and ref not in self._over}
        self._over.update((ref, each) for ref, each in found.items() if each.at in OVER)
        self._over.update(self._cancelled(unseen, rows))
        self._over.update(self._from_accounting(unseen - self._over.keys(), submissions))
        self._waiting = {ref: each for ref, each in found.items() if each.at is SiteState.PENDING}
        self._reported_at = time.monotonic()
        offer = Offer(
            most_jobs=self._settings.most_jobs, card_mb=self._settings.card_mb, most_in_array=self.most_in_submission
        )
        return SiteReport(sightings={**self._over, **found}, offer=offer)

    def cancel(self, ids: Sequence[str]) -> None:
        for command in commands.cancel_commands(ids):
            self._ask(command)

    def output(self, sighting: Sighting) -> None:  # noqa: ARG002 - it is in the submission's folder
        return None

    def nodes(self) -> list[ClusterNode]:
        return commands.parse_states(self._ask(commands.states_command(self._settings)).decode("utf-8", "replace"))

    def run_on(self, node: ClusterNode, script: str, within_s: float) -> str:
        """Run a shell script there, and return what it printed. Needs a time limit of twice `within_s` itself."""
        return self._run(commands.run_command(node, script, self._settings, within_s), {}).decode("utf-8", "replace")

    def _sightings(
        self, rows: Iterable[SlurmJobRow], submissions: Mapping[str, ClusterSubmission]
    ) -> Iterator[tuple[ElementRef, Sighting]]:
        tokens = {job: token for token, job in self._jobs.items()}
        for row in rows:
            submission = submissions.get(tokens.get(row.job, ""))
            number = row.number if submission is not None and submission.count > 1 else 0
            if submission is not None and number is not None:
                yield (submission.token, number), row.sighting

    def _cancelled(self, unseen: set[ElementRef], rows: Sequence[SlurmJobRow]) -> Iterator[tuple[ElementRef, Sighting]]:
        """Yield elements that waited in the last report and are no longer listed: if they had run, they would be."""
        listed = {row.job for row in rows}
        away_s = time.monotonic() - self._reported_at
        for ref in unseen & self._waiting.keys():
            if self._jobs.get(ref[0]) in listed and away_s < self._site_limits().listed_for_s / 2:
                reason = "it was cancelled while it waited"
                yield ref, Sighting(id=self._waiting[ref].id, at=SiteState.CANCELLED, reason=reason)

    def _from_accounting(
        self, unseen: set[ElementRef], submissions: Mapping[str, ClusterSubmission]
    ) -> Iterator[tuple[ElementRef, Sighting]]:
        """Yield how elements ended that are no longer listed. Some sites have no accounting."""
        jobs = {self._jobs[token] for token, _ in unseen if token in self._jobs}
        if not jobs or time.monotonic() < self._ask_accounting_at:
            return
        try:
            rows = commands.parse_accounting(self._ask(commands.accounting_command(jobs)).decode("utf-8", "replace"))
        except SiteUnreachable:
            self._ask_accounting_at = time.monotonic() + 600.0
            return
        yield from ((ref, each) for ref, each in self._sightings(rows, submissions) if ref in unseen)

    def _site_limits(self) -> SlurmLimits:
        if self._limits is None:
            with contextlib.suppress(SiteUnreachable):
                printed = self._ask(commands.configuration_command()).decode("utf-8", "replace")
                self._limits = commands.parse_configuration(printed)
        return self._limits or SlurmLimits()

    def _ask(self, command: Sequence[str]) -> bytes:
        return self._run(command, {"SLURM_TIME_FORMAT": "%s"})

    def _run(self, command: Sequence[str], variables: Mapping[str, str], stdin: bytes = b"") -> bytes:
        program, variables = command[0], {**commands.environment(os.environ), **variables}
        try:
            status, printed, errors = run_command(command, variables, self._limit_s, stdin)
        except NotInTime as error:
            so_far = error.errors.decode("utf-8", "replace")
            raise commands.unanswered(program, self._limit_s, so_far) from error
        except FileNotFoundError as error:
            hint = "start the daemon where Slurm's commands are"
            raise SiteUnreachable(f"there is no {program} on PATH", hint=hint) from error
        except OSError as error:
            raise SiteUnreachable(f"{program} cannot start: {error.strerror}") from error
        except ValueError as error:
            raise SiteRefused(f"invalid options for {program}: {error}") from error
        fault = commands.fault_of(program, status, errors.decode("utf-8", "replace")) if status else None
        if fault is not None:
            raise fault
        return printed
