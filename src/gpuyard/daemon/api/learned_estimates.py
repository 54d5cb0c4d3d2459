"""Answers about learned estimates: the list, and their export, import and deletion."""

import math
from collections.abc import Iterable, Sequence
from datetime import datetime

from gpuyard.daemon.api.codec import EXPORT_PAGE, MOST_ROWS, copy_fields, wall_time
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.errors import UserError
from gpuyard.model.printable_text import printable
from gpuyard.policy.estimates import Moments, Profile, memory_estimate, prediction_error
from gpuyard.policy.sizing import learned_cpus
from gpuyard.schema.queue import EstimateList, EstimateRow, ForgetResult, ImportResult, LearnedProfile, ProfilePage
from gpuyard.schema.requests import EstimatesQuery, ForgetRequest, ImportRequest, ProfilesQuery


class EstimateHandler:
    def __init__(self, scheduler: SchedulerLoop) -> None:
        self._scheduler = scheduler

    def rows(self, query: EstimatesQuery) -> EstimateList:
        """Return estimates, the latest first."""
        self._write_down()
        limit, estimates = min(query.limit, MOST_ROWS), list[EstimateRow]()
        found = self._scheduler.queries.profiles(limit + 1)
        for fingerprint, profile in found[:limit]:
            off = prediction_error(profile)
            row = copy_fields(
                EstimateRow,
                profile,
                fingerprint=fingerprint,
                kind=profile.kind,
                runs=profile.count,
                measured_runs=len(profile.peaks_mb),
                cpus_used=learned_cpus(profile, None),
                memory_mb=memory_estimate(profile),
                peak_mb=max(profile.peaks_mb, default=None),
                off_percent=None if off is None else 100.0 * off,
                seen_at=wall_time(self._scheduler, profile.seen_at),
            )
            estimates.append(row)
        return EstimateList(estimates=estimates, more=len(found) > limit)

    def export(self, query: ProfilesQuery) -> ProfilePage:
        """Return estimates in the order of their fingerprints."""
        self._write_down()
        page = [
            copy_fields(
                LearnedProfile,
                profile,
                fingerprint=fingerprint,
                kind=profile.kind,
                runs=profile.count,
                ram_peaks_mb=list(profile.ram_peaks_mb),
                cpu_uses=list(profile.cpu_uses),
                climb=[[each.count, each.total, each.squares] for each in profile.climb],
                seen_at=wall_time(self._scheduler, profile.seen_at),
            )
            for fingerprint, profile in self._scheduler.queries.profiles_after(query.after, EXPORT_PAGE)
        ]
        return ProfilePage(estimates=page, next=page[-1].fingerprint if len(page) == EXPORT_PAGE else None)

    def import_all(self, request: ImportRequest) -> ImportResult:
        self._write_down()
        profiles = {each.fingerprint: self._read_profile(each) for each in request.estimates}
        imported = self._scheduler.requests.import_estimates(profiles, replace_known=request.replace)
        return ImportResult(imported=imported, kept=len(profiles) - imported)

    def _read_profile(self, sent: LearnedProfile) -> Profile:
        """Return the profile to store. It was not seen in the future, whatever the other machine's clock says."""
        figures = (sent.floor_mb, sent.ram_mb, sent.load_percent, sent.power_w)
        series = (*sent.durations_s, *sent.peaks_mb, *sent.ram_peaks_mb, *sent.cpu_uses)
        if not all(number is None or math.isfinite(number) for number in (*figures, *series)):
            raise UserError(f"estimate {sent.fingerprint}: not all its figures are finite numbers")
        clock = self._scheduler.clock
        try:
            seen_at = clock.from_wall(datetime.fromisoformat(sent.seen_at).timestamp())
        except (ValueError, OverflowError):
            raise UserError(f"seen_at: '{sent.seen_at}' is not a time", hint="send it as it was exported") from None
        return copy_fields(
            Profile,
            sent,
            label=printable(sent.label),
            is_exact=sent.kind == "command",
            is_of_any=sent.kind == "machine",
            count=sent.runs,
            durations_s=tuple(sent.durations_s),
            peaks_mb=tuple(sent.peaks_mb),
            ram_peaks_mb=tuple(sent.ram_peaks_mb),
            cpu_uses=tuple(sent.cpu_uses),
            climb=tuple(Moments(*each) for each in sent.climb),
            seen_at=min(clock.now(), seen_at),
            predicted_mb=None,
            actual_mb=None,
        )

    def forget(self, request: ForgetRequest) -> ForgetResult:
        if bool(request.words) == request.all:
            hint = 'send {"words": ["train.py"]} or {"all": true}'
            raise UserError("which estimates should be forgotten?", hint=hint)
        self._write_down()
        found = None if request.all else _find(self._scheduler.queries.profiles(1_000_000), request.words)
        return ForgetResult(forgotten=self._scheduler.requests.forget_estimates(found))

    def _write_down(self) -> None:
        """Write estimates to the store that are still in memory."""
        with self._scheduler.store.transaction():
            self._scheduler.controller.transitions.estimates.save()


def _find(profiles: Iterable[tuple[str, Profile]], words: Sequence[str]) -> list[str]:
    """Return the fingerprints that start with one of the words; or those whose command contains all words together."""
    known = dict(profiles)
    if all(len(word) >= 6 and set("0123456789abcdef").issuperset(word) for word in words):
        by_start = [{each for each in known if each.startswith(word)} for word in words]
        if all(by_start):
            return sorted(set().union(*by_start))
    text = " ".join(words).strip()
    if not text:
        raise UserError("no estimate is named", hint="name a part of the command, or write --all")
    found = [fingerprint for fingerprint, profile in known.items() if text in profile.label]
    if not found:
        raise UserError(f"no estimate matches '{text}'", hint="`gpuyard estimates` lists all estimates")
    return found
