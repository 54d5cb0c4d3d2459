"""The energy counters of NVIDIA cards: asked for every 10 s, and continued by the card's power in between.

The driver of an H200 takes 3 ms to answer for the counter, and 0.06 ms for all other figures together. Where the power
has said too much by the time that the counter is asked for, the reading stands still until the counter has caught up:
it never falls, unless the counter itself has started again.
"""

from collections.abc import Callable

from msgspec import Struct

# Figures that the driver takes long to answer for, or that change seldom.
ASK_RARELY_S = 10.0


class _Counter(Struct):
    """Times are of the monotonic clock. `expected_j` is the counter as last answered, continued by power."""

    asked_at: float
    answered_j: float
    at: float
    power_w: float | None
    expected_j: float
    returned_j: float


class EnergyCounters:
    def __init__(self) -> None:
        self._cards: dict[str, _Counter] = {}

    def read(self, card_id: str, power_w: float | None, now: float, ask: Callable[[], float | None]) -> float | None:
        """Return the joules that the card has used. `ask` asks the driver, and returns None if it has no counter."""
        card = self._cards.get(card_id)
        is_due = card is None or now - card.asked_at >= ASK_RARELY_S
        if card is None or is_due or power_w is None or card.power_w is None:
            return self._ask(card_id, power_w, now, ask())
        card.expected_j += (card.power_w + power_w) / 2 * (now - card.at)
        card.at, card.power_w = now, power_w
        card.returned_j = max(card.returned_j, card.expected_j)
        return card.returned_j

    def _ask(self, card_id: str, power_w: float | None, now: float, answered_j: float | None) -> float | None:
        before = self._cards.pop(card_id, None)
        if answered_j is None:
            return None
        returned_j = answered_j
        if before is not None and answered_j >= before.answered_j:
            returned_j = max(answered_j, before.returned_j)
        self._cards[card_id] = _Counter(
            asked_at=now,
            answered_j=answered_j,
            at=now,
            power_w=power_w,
            expected_j=answered_j,
            returned_j=returned_j,
        )
        return returned_j
