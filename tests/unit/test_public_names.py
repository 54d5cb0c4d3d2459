import subprocess
import sys

import pytest

import gpuyard


def test_every_public_name_can_be_had() -> None:
    for name in gpuyard.__all__:
        assert getattr(gpuyard, name) is not None
    assert set(gpuyard.__all__) <= set(dir(gpuyard))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="frobnicate"):
        gpuyard.frobnicate  # noqa: B018


def test_importing_the_package_imports_nothing_heavy() -> None:
    check = "import sys, gpuyard; print(sorted({'msgspec', 'psutil', 'rich', 'click'} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=90, check=True)
    assert result.stdout == "[]\n"
