"""Which devices refused a need when a plan last asked, and why: only devices that have changed since are asked again.

Waiting jobs have the same needs in plan after plan, while from one plan to the next few devices change. An answer is
kept with the state of the device that gave it, or with the `mark` of that state where the need looks at nothing else
(`device_memory.FitMark`). So all that an answer depends on must be part of the state, of the question, or of the terms
for which `KnownStates` keeps states.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from msgspec import Struct

from gpuyard.core.lease import Need
from gpuyard.core.scheduling.device_fit import Packing
from gpuyard.core.scheduling.device_memory import DeviceState
from gpuyard.core.scheduling.wait_reasons import Reason

# Answers are kept for at most this many questions.
_MOST_QUESTIONS = 512

Answer = TypeVar("Answer")


class FitQuestion(Struct, frozen=True):
    """A need, on the devices with or without the head's reservation; or on the devices without any lease. `packing` are
    its limits of sharing where they are not the usual ones."""

    need: Need
    packing: Packing | None
    has_head: bool = False
    is_for_later: bool = False


class KnownRefusals:
    """Answers by question. States and marks are always those of all devices, in the same order."""

    def __init__(self) -> None:
        self._refusing: dict[FitQuestion, list[object]] = {}
        self._reasons: dict[FitQuestion, tuple[Sequence[object], list[Reason | None]]] = {}
        self._fits: dict[FitQuestion, tuple[Sequence[object], list[bool]]] = {}

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
        return _ask_changed(self._reasons, question, states, states, find)

    def fits(
        self,
        question: FitQuestion,
        marks: Sequence[object],
        states: Sequence[DeviceState],
        find: Callable[[DeviceState], bool],
    ) -> list[bool]:
        """Return for each device whether it fits. `find` is called where it is not known."""
        return _ask_changed(self._fits, question, marks, states, find)


def _ask_changed(
    answers: dict[FitQuestion, tuple[Sequence[object], list[Answer]]],
    question: FitQuestion,
    marks: Sequence[object],
    states: Sequence[DeviceState],
    find: Callable[[DeviceState], Answer],
) -> list[Answer]:
    known = answers.get(question)
    if known is not None and known[0] == marks:
        return known[1]
    if known is None or len(known[0]) != len(marks):
        found = [find(state) for state in states]
    else:
        asked = zip(states, marks, *known, strict=True)
        found = [answer if mark is before else find(state) for state, mark, before, answer in asked]
    if len(answers) >= _MOST_QUESTIONS:
        answers.clear()
    answers[question] = marks, found
    return found
