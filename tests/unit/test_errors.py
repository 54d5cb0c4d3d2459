"""Exceptions as a script sees them: a traceback ends with the hint, and a copy is as good as the original."""

import copy
import pickle
import traceback

import pytest

from gpuyard.errors import AssetError, EnvironmentFault, GpuyardError, ProbeMissing, UserError, WaitedTooLong

ERRORS = (
    UserError("no GPU has 30 GB", hint="ask for less", code="impossible"),
    WaitedTooLong("1 device could not be leased\n  SIM-0: drained", hint="undrain it"),
    AssetError("scene.ply", "it has no header", hint="export it again"),
    ProbeMissing("nvml", "it is not installed", hint="install it"),
)


@pytest.mark.parametrize("error", ERRORS)
def test_a_traceback_ends_with_the_hint(error: GpuyardError) -> None:
    lines = "".join(traceback.format_exception(error)).splitlines()
    assert lines[-1] == error.hint
    assert error.hint not in str(error)


def test_an_error_without_a_hint_has_no_note() -> None:
    assert "".join(traceback.format_exception(EnvironmentFault("it is gone"))).endswith("it is gone\n")


@pytest.mark.parametrize("error", ERRORS)
def test_a_copied_or_pickled_error_keeps_message_hint_and_code(error: GpuyardError) -> None:
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (type(other), str(other), vars(other)) == (type(error), str(error), vars(error))
        assert traceback.format_exception(other) == traceback.format_exception(error)
