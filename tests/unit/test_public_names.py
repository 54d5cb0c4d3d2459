import subprocess
import sys

import pytest

import gpuyard


def test_every_public_name_can_be_imported() -> None:
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


def test_every_module_can_be_imported_on_this_system() -> None:
    load = (
        "import gpuyard, importlib, pkgutil\n"
        "for module in pkgutil.walk_packages(gpuyard.__path__, 'gpuyard.'):\n"
        "    module.name.endswith('__main__') or importlib.import_module(module.name)\n"
    )
    subprocess.run([sys.executable, "-c", load], timeout=90, check=True)
