"""Clear devices after a repair, by the names that users type."""

from collections.abc import Sequence

from gpuyard.core.device_names import find_all_devices
from gpuyard.core.scheduling.device_health import device_issues
from gpuyard.core.snapshot import Snapshot
from gpuyard.errors import UserError
from gpuyard.leases.ledger import Ledger


def clear_devices(ledger: Ledger, names: Sequence[str | int], snapshot: Snapshot) -> list[str]:
    """Let work start on these cards again although they were faulty, and return their ids. A part of a card stands for
    its card. Raises UserError, before any is cleared, for a device that is not faulty, or that another user marked."""
    marks = ledger.read_health_marks()
    gone = {mark.device_id for mark in marks if snapshot.device(mark.device_id) is None}
    ids = [each for name in names for each in ([str(name)] if name in gone else find_all_devices([name], snapshot))]
    cards = list(dict.fromkeys(_card_of(device_id, snapshot) for device_id in ids))
    issues = device_issues(snapshot, marks)
    for card_id in cards:
        if card_id not in issues and card_id not in gone:
            label = snapshot.labels.get(card_id, card_id)
            raise UserError(f"GPU {label} is not faulty", hint="`gpuyard devices` shows which GPUs are")
    for card_id in cards:
        card = snapshot.device(card_id)
        ledger.clear_health(card_id, None if card is None else card.health)
    return cards


def _card_of(device_id: str, snapshot: Snapshot) -> str:
    device = snapshot.device(device_id)
    return device_id if device is None or device.parent is None else device.parent
