"""The commands that upgrade and remove gpuyard use the program that installed it."""

import json
from importlib import metadata
from pathlib import Path

import pytest

from gpuyard import installation
from gpuyard.installation import find_installation

PYTHON = "/opt/env/bin/python"


class Metadata:
    """What an installer recorded about the package."""

    def __init__(self, requires: tuple[str, ...] = (), **files: str) -> None:
        self.requires = requires
        self._files = files

    def read_text(self, name: str) -> str | None:
        return self._files.get(name.partition(".")[0])


def record(monkeypatch: pytest.MonkeyPatch, requires: tuple[str, ...] = (), **files: str) -> None:
    real = metadata.distribution
    own = Metadata(requires, **files)
    monkeypatch.setattr(metadata, "distribution", lambda name: own if name == "gpuyard" else real(name))


def test_pipx_is_recognised_by_its_metadata_file_and_the_environment_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "gpuyard_next"
    folder.mkdir()
    (folder / "pipx_metadata.json").touch()
    found = find_installation(str(folder), PYTHON)
    assert (found.folder, found.upgrade, found.remove) == (
        str(folder), "pipx upgrade gpuyard_next", "pipx uninstall gpuyard_next",
    )  # fmt: skip


def test_tools_and_pip_are_recognised_by_what_they_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(monkeypatch, INSTALLER="pip\n")
    found = find_installation(str(tmp_path), "/opt/my env/bin/python")
    assert found.upgrade == "'/opt/my env/bin/python' -m pip install --upgrade gpuyard"
    assert found.remove == "'/opt/my env/bin/python' -m pip uninstall gpuyard"
    # Uv removes a package that uv installed into an environment.
    record(monkeypatch, INSTALLER="uv")
    assert find_installation(str(tmp_path), PYTHON).remove == f"uv pip uninstall --python {PYTHON} gpuyard"
    (tmp_path / "uv-receipt.toml").touch()
    found = find_installation(str(tmp_path), PYTHON)
    assert (found.upgrade, found.remove) == ("uv tool upgrade gpuyard", "uv tool uninstall gpuyard")


def test_a_checkout_of_its_own_is_removed_by_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    direct = json.dumps({"url": tmp_path.as_uri(), "dir_info": {"editable": True}})
    record(monkeypatch, INSTALLER="pip", direct_url=direct)
    elsewhere = find_installation("/opt/env", PYTHON)
    assert elsewhere.upgrade == f"{PYTHON} -m pip install --editable --upgrade {tmp_path}"
    found = find_installation(str(tmp_path / ".venv"), PYTHON)
    assert found.upgrade == f"git -C {tmp_path} pull && make -C {tmp_path} install"
    assert found.remove == f"make -C {tmp_path} clean"


def test_an_extra_is_added_from_the_same_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(monkeypatch, INSTALLER="pip")
    assert find_installation(str(tmp_path), PYTHON).with_extra("top") == f"{PYTHON} -m pip install 'gpuyard[top]'"
    record(monkeypatch, INSTALLER="pip", direct_url=json.dumps({"url": "file:///data/my%20copy", "dir_info": {}}))
    assert find_installation(str(tmp_path), PYTHON).with_extra("top") == (
        f"{PYTHON} -m pip install '/data/my copy[top]'"
    )
    (tmp_path / "uv-receipt.toml").touch()
    assert find_installation(str(tmp_path), PYTHON).with_extra("top") == (
        "uv tool install --force '/data/my copy[top]'"
    )
    (tmp_path / "pipx_metadata.json").touch()
    assert find_installation(str(tmp_path), PYTHON).with_extra("render") == (
        "pipx install --force '/data/my copy[render]'"
    )


def test_a_reinstalled_tool_keeps_its_extras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requires = (
        "click>=8.1",
        "pytest>=8; extra == 'there'",
        "pytest>=8 ; python_version >= '3.11' and extra == 'half'",
        'no-such-package>=1; extra == "half"',
        "no-such-package; extra == 'missing'",
    )
    record(monkeypatch, requires, INSTALLER="uv")
    (tmp_path / "pipx_metadata.json").touch()
    found = find_installation(str(tmp_path), PYTHON)
    assert found.with_extra("missing") == "pipx install --force 'gpuyard[missing,there]'"
    assert found.with_extra("there") == "pipx install --force 'gpuyard[there]'"


@pytest.mark.parametrize("direct", ["{", "[]", '{"url": "https://example.org/x.whl"}', '{"url": "file:///x"}'])
def test_any_other_origin_is_not_a_checkout(direct: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(monkeypatch, INSTALLER="pip", direct_url=direct)
    assert "-m pip uninstall" in find_installation(str(tmp_path), PYTHON).remove


def test_a_copy_without_metadata_is_removed_as_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> Metadata:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "distribution", missing)
    assert find_installation(str(tmp_path), PYTHON).remove == f"rm -r {Path(installation.__file__).parent}"
