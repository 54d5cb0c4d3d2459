"""Where each label of a run ended: rendered, skipped, or set aside for the end. Each ends once."""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from gpuyard.residency.planning.assets import path_of
from gpuyard.residency.planning.render_units import Label, Unit
from gpuyard.residency.running.status_file import Skip

if TYPE_CHECKING:
    from gpuyard.residency.running.output_folders import Outputs


class SkipReason(msgspec.Struct, frozen=True, kw_only=True):
    """As `Skip` has it."""

    kind: str
    reason: str
    traceback: str | None = None
    sizes: dict[str, int] = {}
    state: dict[str, int] = {}


class LabelResults:
    """Of all workers."""

    def __init__(self, outputs: "Outputs") -> None:
        self._outputs = outputs
        self._lock = threading.Lock()
        self._aside: list[Unit] = []
        self._is_last_try = False
        self.skips: list[Skip] = []
        self.labels = self.already = self.done = 0

    def expect(self, labels: int, *, already: int) -> None:
        self.labels += labels
        self.already += already

    def rendered(self) -> None:
        with self._lock:
            self.done += 1

    def skipped(self, unit: Unit, labels: Sequence[Label], why: SkipReason) -> None:
        for label in labels:
            skip = Skip(
                label=label.name,
                kind=why.kind,
                reason=why.reason,
                traceback=why.traceback,
                scene=path_of(unit.scene),
                actor=path_of(unit.actor),
                sizes=why.sizes,
                state=why.state,
            )
            with self._lock:
                self.skips.append(skip)
            self._outputs.skip(skip)

    def set_aside(self, unit: Unit, labels: Sequence[Label], why: SkipReason) -> None:
        """To be tried alone at the end; on that last try it is skipped."""
        if self._is_last_try:
            self.skipped(unit, labels, why)
        elif labels:
            with self._lock:
                self._aside.append(Unit(scene=unit.scene, actor=unit.actor, labels=tuple(labels)))

    def take_aside(self) -> list[Unit]:
        """All labels of the same assets together. Nothing is set aside from now on."""
        self._is_last_try = True
        labels: dict[tuple[str | None, str | None], list[Label]] = {}
        for unit in self._aside:
            labels.setdefault((unit.scene, unit.actor), []).extend(unit.labels)
        return [Unit(scene=scene, actor=actor, labels=tuple(its)) for (scene, actor), its in labels.items()]

    @property
    def left(self) -> int:
        return self.labels - self.already - self.done - len(self.skips)
