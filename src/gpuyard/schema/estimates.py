"""Answers about learned estimates."""

from typing import Annotated

from msgspec import Meta, Struct

from gpuyard.policy.estimates import FLAT_S, KEPT_DURATIONS, KEPT_PEAKS, ProfileKind
from gpuyard.policy.numbers import KEPT_HOST_USES
from gpuyard.schema.queue import Iso


class EstimateRow(Struct, frozen=True, kw_only=True):
    """What past runs of a command, of a program with any arguments, or first runs of any program have taught."""

    fingerprint: str
    label: str
    kind: ProfileKind
    runs: int
    measured_runs: int
    memory_mb: float | None
    peak_mb: float | None
    floor_mb: float | None
    ram_mb: float | None
    cpus_used: float | None
    load_percent: float | None
    power_w: float | None
    least_s: float | None
    mean_s: float | None
    most_s: float | None
    predicted_mb: float | None
    actual_mb: float | None
    off_percent: float | None
    seen_at: Iso | None


class EstimateList(Struct, frozen=True, kw_only=True):
    """`more`: there are estimates beyond the limit."""

    estimates: list[EstimateRow]
    more: bool


Amount = Annotated[float, Meta(ge=0, le=1e12)]


class LearnedProfile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An estimate as it is exported: `runs` successful runs, the durations of the last ones, their peaks on one device,
    and `floor_mb`, memory that was not enough. `kind` is command, program or machine. `climb` is what was missing of
    the peak once memory had been flat for 1, 2, 4, … seconds: count, sum and sum of squares of the parts. With
    `preallocates`, this framework took most of a device at once in these runs. `ram_peaks_mb` and `cpu_uses` are of the
    last runs."""

    fingerprint: Annotated[str, Meta(min_length=24, max_length=24)]
    kind: ProfileKind
    label: Annotated[str, Meta(max_length=1000)]
    runs: Annotated[int, Meta(ge=0, le=1_000_000_000)]
    durations_s: Annotated[list[Amount], Meta(max_length=KEPT_DURATIONS)] = []
    peaks_mb: Annotated[list[Amount], Meta(max_length=KEPT_PEAKS)] = []
    climb: Annotated[list[Annotated[list[Amount], Meta(min_length=3, max_length=3)]], Meta(max_length=len(FLAT_S))] = []
    floor_mb: Amount | None = None
    ram_mb: Amount | None = None
    ram_peaks_mb: Annotated[list[Amount], Meta(max_length=KEPT_HOST_USES)] = []
    cpu_uses: Annotated[list[Amount], Meta(max_length=KEPT_HOST_USES)] = []
    load_percent: Amount | None = None
    power_w: Amount | None = None
    preallocates: Annotated[str, Meta(max_length=20)] = ""
    seen_at: Iso


class ProfilePage(Struct, frozen=True, kw_only=True):
    """`next` is the `after` of the next page, null on the last one."""

    estimates: list[LearnedProfile]
    next: str | None


class ImportResult(Struct, frozen=True, kw_only=True):
    """`kept` counts estimates that were learned here, and stay."""

    imported: int
    kept: int


class ForgetResult(Struct, frozen=True, kw_only=True):
    forgotten: int
