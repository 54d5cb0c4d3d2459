"""Record the result of each label of a run: rendered, skipped, or postponed to the end. Each label ends once."""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from gpuyard.residency.planning.assets import path_of
from gpuyard.residency.planning.render_units import Label, Unit
from gpuyard.residency.running.status_file import Skip, SkipReason

if TYPE_CHECKING:
    from gpuyard.residency.running.output_folders import Outputs


class LabelResults:
    """The results of all workers."""

    def __init__(self, outputs: "Outputs") -> None:
        self._outputs = outputs
        self._lock = threading.Lock()
        self._postponed: list[Unit] = []
        self._is_last_try = False
        self.skips: list[Skip] = []
        self.labels = self.already = self.rendered = 0

    def expect(self, labels: int, *, already: int) -> None:
        self.labels += labels
        self.already += already

    def count_rendered(self) -> None:
        with self._lock:
            self.rendered += 1

    def skip(self, unit: Unit, labels: Sequence[Label], why: SkipReason) -> None:
        reason = msgspec.structs.asdict(why)
        for label in labels:
            skip = Skip(label=label.name, scene=path_of(unit.scene), actor=path_of(unit.actor), **reason)
            with self._lock:
                self.skips.append(skip)
            self._outputs.skip(skip)

    def postpone(self, unit: Unit, labels: Sequence[Label], why: SkipReason) -> None:
        """Postpone the labels, to be tried alone at the end; skip them if this is that last try."""
        if self._is_last_try:
            self.skip(unit, labels, why)
        elif labels:
            with self._lock:
                self._postponed.append(Unit(scene=unit.scene, actor=unit.actor, labels=tuple(labels)))

    def take_postponed(self) -> list[Unit]:
        """Return the postponed labels, grouped by their assets. From now on, labels are skipped, not postponed."""
        self._is_last_try = True
        labels: dict[tuple[str | None, str | None], list[Label]] = {}
        for unit in self._postponed:
            labels.setdefault((unit.scene, unit.actor), []).extend(unit.labels)
        return [Unit(scene=scene, actor=actor, labels=tuple(some)) for (scene, actor), some in labels.items()]

    @property
    def left(self) -> int:
        return self.labels - self.already - self.rendered - len(self.skips)
