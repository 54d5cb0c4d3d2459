"""Measures the energy of live attempts, sample by sample, by the rules of `model/energy.py`.

The last reading of a card is up to a second old when an attempt ends. Until then the card is assumed to draw what it
drew at that reading. A part of a card (a MIG instance) has no power of its own: attempts on parts share the card.
"""

from bisect import bisect_right, insort
from collections.abc import Mapping
from operator import attrgetter

from msgspec import Struct, field
from msgspec.structs import replace

from gpuyard.model.energy import (
    LONGEST_GAP_S,
    SHORTEST_PEAK_S,
    CardHolder,
    CardReading,
    EnergyUse,
    add_energy,
    energy_between,
    share_energy,
)
from gpuyard.model.job import Usage
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Device, Sample, Snapshot
from gpuyard.queue.live_attempts import Live
from gpuyard.queue.transitions import JobTransitions

_until = attrgetter("until")

Loads = Mapping[tuple[str, str], float | None]


class _Card(Struct, kw_only=True):
    """The last reading of a card, what its holders and other processes did then, and who has left it since."""

    device: Device
    reading: CardReading
    idle_w: float | None
    foreign_percent: float = 0.0
    uses: dict[int, float | None] = {}
    left: list[CardHolder] = field(default_factory=list)  # in the order of their ends


class EnergyMeter:
    """`total` is the energy of all attempts since the daemon started."""

    def __init__(self, transitions: JobTransitions) -> None:
        self._transitions = transitions
        self._last: Sample | None = None
        self._cards: dict[str, _Card] = {}
        self.total = EnergyUse()

    def note(self, sample: Sample, loads: Loads, ended_at: Mapping[int, float]) -> None:
        """Charge what the cards used since the last sample. `ended_at`: by job, ends that are not recorded yet."""
        at = sample.snapshot.taken_at
        if sample is self._last or sample.reread or at is None:
            return
        self._last = sample
        devices = sample.snapshot.devices
        metered = [each for each in devices if each.energy_j is not None or each.power_draw_w is not None]
        # Samples may follow each other within milliseconds, and a counter moves about ten times a second.
        known = self._cards.get
        read = [
            device
            for device in metered
            if (card := known(device.id)) is None or (device is not card.device and at - card.reading.at >= 0.2)
        ]
        holders = self._holders(sample.snapshot) if read else {}
        parts: dict[int, EnergyUse] = {}
        for device in read:
            before = self._cards.get(device.id)
            here = holders.get(device.id, {})
            uses = {key: _use(device, ids, live, loads, is_alone=len(here) == 1) for key, (live, ids) in here.items()}
            powers = (None if before is None else before.idle_w, device.power_draw_w)
            card = _Card(
                device=device,
                reading=CardReading(at=at, counter_j=device.energy_j, power_w=device.power_draw_w),
                idle_w=min((each for each in powers if each is not None), default=None),
                foreign_percent=_foreign(device, uses),
                uses=uses,
            )
            self._cards[device.id] = card
            if before is not None and (here or before.left):
                until = {key: min(at, ended_at.get(key, at)) for key in here}  # it may have begun, or ended, after `at`
                held = [_holder(key, live, uses[key], before, until[key]) for key, (live, _) in here.items()]
                _add_parts(parts, before, card, held)
        for key, part in parts.items():
            self._charge(key, part)

    def settle(self, ended_at: Mapping[int, float]) -> None:
        """Charge attempts that end now for the time since the last reading of their cards."""
        if not ended_at or self._last is None or not self._cards:
            return
        holders = self._holders(self._last.snapshot)
        for card_id, here in holders.items():
            card = self._cards.get(card_id)
            ending = here.keys() & ended_at.keys()
            if card is None or card.reading.power_w is None or not ending:
                continue
            held = {
                key: _holder(key, live, card.uses.get(key), card, ended_at.get(key, max(ended_at.values())))
                for key, (live, _) in here.items()
            }
            for key in ending:
                self._settle_on(card, held[key], [each for each in held.values() if each.until > each.since])

    def _settle_on(self, card: _Card, ending: CardHolder, held: list[CardHolder]) -> None:
        since, until = ending.since, ending.until  # what others did before it began is no matter to it
        if not 0.0 < until - card.reading.at <= LONGEST_GAP_S or until <= since:
            return
        left = card.left[bisect_right(card.left, since, key=_until) :]  # very many may have come and gone
        beside = (each for each in (*held, *left) if each.until > since)
        cut = [replace(each, since=max(each.since, since), until=min(each.until, until)) for each in beside]
        parts, _ = share_energy(
            (card.reading.power_w or 0.0) * (until - since),
            since,
            until,
            [each for each in cut if each.until > each.since],
            idle_w=card.idle_w,
            foreign_percent=card.foreign_percent,
            is_integrated=card.reading.counter_j is None,
        )
        if ending.key in parts:
            self._charge(ending.key, parts[ending.key])
        insort(card.left, replace(ending, key=-ending.key), key=_until)  # a next attempt of the job may follow at once

    def _charge(self, key: int, part: EnergyUse) -> None:
        self.total = add_energy(self.total, part)
        live = self._transitions.live.get(key)
        if live is not None:
            usage = live.attempt.usage or Usage()
            self._transitions.note_usage(key, replace(usage, energy=add_energy(usage.energy, part)))

    def _holders(self, snapshot: Snapshot) -> dict[str, dict[int, tuple[Live, list[str]]]]:
        """Return the attempts on each card by job, with their devices there: the card, or parts of it."""
        cards = {device.id: device.parent or device.id for device in snapshot.devices}
        found: dict[str, dict[int, tuple[Live, list[str]]]] = {}
        for key, live in self._transitions.live.items():
            if live.attempt.started is None or live.job.state in (JobState.SUSPENDED, JobState.RESUMING):  # in RAM
                continue
            for device_id in live.attempt.devices:
                if device_id in cards:
                    found.setdefault(cards[device_id], {}).setdefault(key, (live, []))[1].append(device_id)
        return found


def _holder(key: int, live: Live, use: float | None, card: _Card, until: float) -> CardHolder:
    since = max(card.reading.at, live.attempt.since)
    return CardHolder(key=key, since=since, until=max(since, until), use_percent=use)


def _add_parts(parts: dict[int, EnergyUse], before: _Card, now: _Card, held: list[CardHolder]) -> None:
    """Add each holder's part of a card's energy between two readings. Attempts that left meanwhile have paid theirs."""
    found = energy_between(before.reading, now.reading)
    if found is None:
        return
    joules, is_integrated = found
    present = [each for each in held if each.until > each.since]
    shares, _ = share_energy(
        joules, before.reading.at, now.reading.at, [*present, *before.left],
        idle_w=now.idle_w, foreign_percent=now.foreign_percent, is_integrated=is_integrated,
    )  # fmt: skip
    for each in present:
        share = shares[each.key]
        if share.seconds >= SHORTEST_PEAK_S:
            share = replace(share, peak_w=share.joules / share.seconds)
        parts[each.key] = add_energy(parts.get(each.key), share)


def _use(device: Device, ids: list[str], live: Live, loads: Loads, *, is_alone: bool) -> float | None:
    """Return how busy an attempt keeps a card; None: unknown."""
    known = [loads.get((live.attempt.lease_id or "", device_id)) for device_id in ids]
    found = [load for load in known if load is not None]
    if len(found) == len(known):
        return sum(found)
    return device.utilization_percent if is_alone or device.utilization_percent == 0.0 else None


def _foreign(device: Device, uses: Mapping[int, float | None]) -> float:
    """Return how busy processes keep a card that belong to no attempt; 0 where the driver does not say."""
    loads = [process.utilization_percent for process in device.processes or ()]
    known = [load for load in loads if load is not None]
    if not known or len(known) < len(loads) or None in uses.values():
        return 0.0
    rest = sum(known) - sum(use or 0.0 for use in uses.values())
    return rest if rest >= 1.0 else 0.0
