"""Which devices refused a need when a plan last asked, and why: only devices that have changed since are asked again.

Waiting jobs have the same needs in plan after plan, while from one plan to the next few devices change. An answer is
kept with the state of the device that gave it, or with the `mark` of that state where the need looks at nothing else
(`device_memory.FitMark`). So all that an answer depends on must be part of the state, of the question, or of the terms
for which `KnownStates` keeps states.
"""

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from gpuyard.core.lease import Need
from gpuyard.core.scheduling.device_memory import DeviceState
from gpuyard.core.scheduling.wait_reasons import Reason

# Answers are kept for at most this many questions.
_MOST_QUESTIONS = 512


class FitQuestion(Struct, frozen=True):
    """A need, under the usual limits of sharing or not, on the devices with or without the head's reservation."""

    need: Need
    is_usual: bool
    has_head: bool


class KnownRefusals:
    """Answers by question. States and marks are always those of all devices, in the same order."""

    def __init__(self) -> None:
        self._refusing: dict[FitQuestion, list[object]] = {}
        self._reasons: dict[FitQuestion, tuple[list[DeviceState], list[Reason | None]]] = {}

    def open_places(self, question: FitQuestion, marks: Sequence[object]) -> list[int]:
        """Return the places of the devices that are not known to refuse."""
        known = self._refusing.get(question)
        if known is None or len(known) != len(marks):
            return list(range(len(marks)))
        if known == marks:
            return []
        return [place for place, refusing in enumerate(known) if refusing is not marks[place]]

    def note(self, question: FitQuestion, marks: Sequence[object], places: Iterable[int]) -> None:
        """Note that the devices at these places refuse."""
        known = self._refusing.get(question)
        if known is None or len(known) != len(marks):
            if len(self._refusing) >= _MOST_QUESTIONS:
                self._refusing.clear()
            known = self._refusing[question] = [None] * len(marks)
        for place in places:
            known[place] = marks[place]

    def reasons(
        self, question: FitQuestion, states: list[DeviceState], find: Callable[[DeviceState], Reason | None]
    ) -> list[Reason | None]:
        """Return the reason of each device; None where it does not refuse. `find` is called where it is not known."""
        known = self._reasons.get(question)
        if known is not None and known[0] == states:
            return known[1]
        if known is None or len(known[0]) != len(states):
            found = [find(state) for state in states]
        else:
            found = [
                reason if state is before else find(state) for state, before, reason in zip(states, *known, strict=True)
            ]
        if len(self._reasons) >= _MOST_QUESTIONS:
            self._reasons.clear()
        self._reasons[question] = states, found
        return found
