"""Exceptions as a script sees them: a traceback ends with the hint, and a copy is as good as the original."""

import copy
import pickle
import subprocess
import sys
import traceback

import pytest

import gpuyard
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


def test_public_names_can_be_imported_and_others_not() -> None:
    for name in gpuyard.__all__:
        assert getattr(gpuyard, name) is not None
    assert set(gpuyard.__all__) <= set(dir(gpuyard)), "every public name can be imported"
    # An unknown name is an attribute error.
    with pytest.raises(AttributeError, match="frobnicate"):
        gpuyard.frobnicate  # noqa: B018


def test_importing_the_package_imports_nothing_heavy() -> None:
    check = "import sys, gpuyard; print(sorted({'msgspec', 'psutil', 'rich', 'click'} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=90, check=True)
    assert result.stdout == "[]\n"


def test_every_module_can_be_imported_on_this_system() -> None:
    load = (
        "import gpuyard, importlib, pkgutil\n"
        "for module in pkgutil.walk_packages(gpuyard.__path__, 'gpuyard.'):\n"
        "    module.name.endswith('__main__') or importlib.import_module(module.name)\n"
    )
    subprocess.run([sys.executable, "-c", load], timeout=90, check=True)
