"""A limit for the power of all GPUs together, such as that of a circuit breaker.

Rules:
- A card draws what its jobs are known to draw, at most its own power limit, and never less than it draws now. That
  covers idle cards, foreign processes and jobs of other queues.
- A job whose draw is unknown is assumed to drive its cards to their power limit. A card that reports no power limit
  counts with what it draws now.
- A job that does not fit waits, and a later job goes ahead of it only if it ends before the waiting job could start.
- While no job of this queue uses a GPU, any job may start: one that exceeds the limit by itself runs alone, rather than
  never.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from gpuyard.core.lease import Claim
from gpuyard.core.scheduling.wait_reasons import REMEDIES, Reason, ReasonKind
from gpuyard.core.scheduling.world import PowerLimit, RunningJob
from gpuyard.core.snapshot import Snapshot

_BRIEF = "the GPUs would draw too much power with it"


class _Draw(Struct, frozen=True):
    """A job on its cards: its power on each, and the earliest time of its end."""

    cards: tuple[str, ...]
    each_w: float | None
    ends_at: float


class PowerBudget:
    """The power of all cards with the starts of one plan."""

    def __init__(self, limit: PowerLimit, snapshot: Snapshot, running: Sequence[RunningJob], now: float) -> None:
        self._limit = limit
        self._now = now
        self._card_of = {device.id: device.parent or device.id for device in snapshot.devices}
        self._measured_w = {device.id: device.power_draw_w or 0.0 for device in snapshot.devices}
        self._highest_w = {device.id: device.power_limit_w for device in snapshot.devices}
        self._draws: list[_Draw] = []
        self._starts_at: float | None = None  # the earliest start of the first job that waits for power
        for job in running:
            if job.device_ids and job.job_id in limit.running_w:
                self._add(job.device_ids, limit.running_w[job.job_id], job.ends_after)

    def add_start(self, claim: Claim, own_w: float | None, least_s: float | None) -> None:
        """Count a job that starts and draws `own_w` per GPU (None: unknown); it takes at least `least_s`."""
        if claim.shares:
            self._add(_ids(claim), own_w, self._now + (least_s or 0.0))

    def _add(self, device_ids: Sequence[str], each_w: float | None, ends_at: float | None) -> None:
        self._draws.append(_Draw(self._cards(device_ids), each_w, max(self._now, ends_at or self._now)))

    def refusal(self, claim: Claim, own_w: float | None, most_s: float | None) -> Reason | None:
        """Return why the job may not start with this claim; None if it may. `most_s` is the longest that it takes."""
        if not claim.shares or not self._draws:
            return None
        draw = _Draw(self._cards(_ids(claim)), own_w, self._now)
        fits = self.total_w(draw) <= self._limit.limit_w
        if self._starts_at is None:
            self._starts_at = None if fits else self._earliest_start(draw)
        elif fits and (most_s is None or self._now + most_s > self._starts_at):
            return self._reason(draw, "; another job waits for power, and this one could delay it")
        return None if fits else self._reason(draw)

    def _cards(self, device_ids: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._card_of[each] for each in device_ids if each in self._card_of))

    def total_w(self, *new: _Draw) -> float:
        """Return what all cards draw with the jobs that run or start, and with `new` ones."""
        return self._sum_w([*self._draws, *new], self._measured_w)

    def _sum_w(self, draws: Sequence[_Draw], measured_w: Mapping[str, float]) -> float:
        by_card: dict[str, float] = {}
        for draw in draws:
            for card in draw.cards:
                highest = self._highest_w.get(card)
                each_w = highest if draw.each_w is None else draw.each_w
                drawn = by_card.get(card, 0.0) + (each_w or 0.0)
                by_card[card] = drawn if highest is None else min(drawn, highest)
        return sum(max(measured, by_card.get(card, 0.0)) for card, measured in measured_w.items())

    def _earliest_start(self, new: _Draw) -> float:
        """Return when enough jobs may have ended for the job to fit. What cards draw now that jobs use says nothing
        about the time after that."""
        left = sorted(self._draws, key=lambda draw: draw.ends_at)
        busy = {card for draw in left for card in draw.cards}
        measured_w = {card: 0.0 if card in busy else drawn for card, drawn in self._measured_w.items()}
        at = self._now
        while left and self._sum_w([*left, new], measured_w) > self._limit.limit_w:
            at = left.pop(0).ends_at
        return at

    def _reason(self, new: _Draw, why: str = "") -> Reason:
        now_w, then_w, limit_w = self.total_w(), self.total_w(new), self._limit.limit_w
        text = f"the GPUs would draw about {then_w:.0f} W with it and about {now_w:.0f} W without it"
        text = f"{text}; at most {limit_w:.0f} W are allowed{why}"
        return Reason(ReasonKind.POWER_LIMIT, text, had=then_w, needed=limit_w, remedy=REMEDIES["power"], brief=_BRIEF)


def _ids(claim: Claim) -> list[str]:
    return [share.device_id for share in claim.shares]
