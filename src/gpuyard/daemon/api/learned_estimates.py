"""Answers about learned estimates: the list, and their export, import and deletion."""

import math
from collections.abc import Sequence
from datetime import datetime

from gpuyard.daemon.api.codec import EXPORT_PAGE, MOST_ROWS, copy_fields, wall_time
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.errors import UserError
from gpuyard.model.printable_text import printable
from gpuyard.policy.estimates import Moments, Profile, kind_of_profile, memory_estimate, prediction_error
from gpuyard.policy.sizing import learned_cpus
from gpuyard.schema.estimates import EstimateList, EstimateRow, ForgetResult, ImportResult, LearnedProfile, ProfilePage
from gpuyard.schema.requests import EstimatesQuery, ForgetRequest, ImportRequest, ProfilesQuery

_MOST = 1_000_000
_SHORTEST_FINGERPRINT = 6
_HEX = frozenset("0123456789abcdef")


def _make_estimate(scheduler: SchedulerLoop, fingerprint: str, profile: Profile) -> EstimateRow:
    off = prediction_error(profile)
    return copy_fields(
        profile,
        EstimateRow,
        fingerprint=fingerprint,
        kind=kind_of_profile(profile),
        runs=profile.count,
        measured_runs=len(profile.peaks_mb),
        cpus_used=learned_cpus(profile, None),
        memory_mb=memory_estimate(profile),
        peak_mb=max(profile.peaks_mb, default=None),
        off_percent=None if off is None else 100.0 * off,
        seen_at=wall_time(scheduler, profile.seen_at),
    )


def estimate_list(scheduler: SchedulerLoop, query: EstimatesQuery) -> EstimateList:
    """Return estimates, the latest first."""
    _write_down(scheduler)
    limit = min(query.limit, MOST_ROWS)
    found = scheduler.queries.profiles(limit + 1)
    return EstimateList(estimates=[_make_estimate(scheduler, *each) for each in found[:limit]], more=len(found) > limit)


def export_estimates(scheduler: SchedulerLoop, query: ProfilesQuery) -> ProfilePage:
    """Return estimates in the order of their fingerprints."""
    _write_down(scheduler)
    page = [
        copy_fields(
            profile,
            LearnedProfile,
            fingerprint=fingerprint,
            kind=kind_of_profile(profile),
            runs=profile.count,
            ram_peaks_mb=list(profile.ram_peaks_mb),
            cpu_uses=list(profile.cpu_uses),
            climb=[[each.count, each.total, each.squares] for each in profile.climb],
            seen_at=wall_time(scheduler, profile.seen_at),
        )
        for fingerprint, profile in scheduler.queries.profiles_after(query.after, EXPORT_PAGE)
    ]
    return ProfilePage(estimates=page, next=page[-1].fingerprint if len(page) == EXPORT_PAGE else None)


def import_estimates(scheduler: SchedulerLoop, request: ImportRequest) -> ImportResult:
    _write_down(scheduler)
    profiles = {each.fingerprint: _read_profile(scheduler, each) for each in request.estimates}
    imported = scheduler.requests.import_estimates(profiles, replace_known=request.replace)
    return ImportResult(imported=imported, kept=len(profiles) - imported)


def _read_profile(scheduler: SchedulerLoop, sent: LearnedProfile) -> Profile:
    """Return the profile to store. It was not seen in the future, whatever the other machine's clock says."""
    figures = (sent.floor_mb, sent.ram_mb, sent.load_percent, sent.power_w)
    series = (*sent.durations_s, *sent.peaks_mb, *sent.ram_peaks_mb, *sent.cpu_uses)
    if not all(number is None or math.isfinite(number) for number in (*figures, *series)):
        raise UserError(f"estimate {sent.fingerprint}: not all its figures are finite numbers")
    try:
        seen_at = scheduler.clock.from_wall(datetime.fromisoformat(sent.seen_at).timestamp())
    except (ValueError, OverflowError):
        raise UserError(f"seen_at: '{sent.seen_at}' is not a time", hint="send it as it was exported") from None
    return copy_fields(
        sent,
        Profile,
        label=printable(sent.label),
        is_exact=sent.kind == "command",
        is_of_any=sent.kind == "machine",
        count=sent.runs,
        durations_s=tuple(sent.durations_s),
        peaks_mb=tuple(sent.peaks_mb),
        ram_peaks_mb=tuple(sent.ram_peaks_mb),
        cpu_uses=tuple(sent.cpu_uses),
        climb=tuple(Moments(*each) for each in sent.climb),
        seen_at=min(scheduler.clock.now(), seen_at),
        predicted_mb=None,
        actual_mb=None,
    )


def _write_down(scheduler: SchedulerLoop) -> None:
    """Write estimates to the store that are still in memory."""
    with scheduler.store.transaction():
        scheduler.controller.transitions.estimates.save()


def forget_estimates(scheduler: SchedulerLoop, request: ForgetRequest) -> ForgetResult:
    if bool(request.words) == request.all:
        raise UserError("which estimates should be forgotten?", hint='send {"words": ["train.py"]} or {"all": true}')
    _write_down(scheduler)
    found = None if request.all else _find(scheduler.queries.profiles(_MOST), request.words)
    return ForgetResult(forgotten=scheduler.requests.forget_estimates(found))


def _find(profiles: Sequence[tuple[str, Profile]], words: Sequence[str]) -> list[str]:
    """Return the fingerprints that start with one of the words; or those whose command contains all words together."""
    hexes = [word for word in words if len(word) >= _SHORTEST_FINGERPRINT and _HEX.issuperset(word)]
    by_start = [[each for each, _ in profiles if each.startswith(word)] for word in hexes]
    if len(hexes) == len(words) and all(by_start):
        return sorted({fingerprint for found in by_start for fingerprint in found})
    text = " ".join(words).strip()
    if not text:
        raise UserError("no estimate is named", hint="name a part of the command, or write --all")
    found = [fingerprint for fingerprint, profile in profiles if text in profile.label]
    if not found:
        raise UserError(f"no estimate matches '{text}'", hint="`gpuyard estimates` lists all estimates")
    return found
