"""Any installed tool activates an environment as `conda activate` does; failures are reported."""

import os
import shlex
import sys
from pathlib import Path

import pytest

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.recipes.workspace.prepare_sweep import activate_environment
from tests.executables import write_executable

STAND_IN = Path(__file__).with_name("stand_in_conda.py")


class Installation:
    """A root with a tool in `bin` and environments in `envs`."""

    def __init__(self, root: Path, tool: str = "conda") -> None:
        self.root = root
        self.tool = root / "bin" / tool
        self.tool.parent.mkdir(parents=True)
        self.add("base")
        (root / "envs").mkdir()
        command = shlex.join([sys.executable, "-I", str(STAND_IN), str(self.tool)])
        write_executable(self.tool, f'#!/bin/sh\nexec {command} "$@"\n')

    def add(self, name: str) -> Path:
        prefix = self.root if name == "base" else self.root / "envs" / name
        (prefix / "conda-meta").mkdir(parents=True)
        return prefix

    def hook(self, name: str, text: str, kind: str = "activate") -> None:
        folder = self.root / "envs" / name / "etc" / "conda" / f"{kind}.d"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{len(list(folder.iterdir()))}.sh").write_text(text)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a user without conda."""
    return {"PATH": os.defpath, "HOME": str(tmp_path / "home"), "KEPT": "a\nb=c"}


@pytest.fixture
def conda(tmp_path: Path, environment: dict[str, str]) -> Installation:
    """An installation with the environment `torch`."""
    made = Installation(tmp_path / "miniconda")
    made.add("torch")
    environment["CONDA_EXE"] = str(made.tool)
    return made


def test_an_environment_is_activated(conda: Installation, environment: dict[str, str]) -> None:
    prefix = conda.root / "envs/torch"
    assert activate_environment("torch", environment) == {
        **environment,
        "PATH": f"{prefix}/bin:{os.defpath}",
        "CONDA_PREFIX": str(prefix),
        "CONDA_SHLVL": "1",
        "CONDA_DEFAULT_ENV": "torch",
        "CONDA_PROMPT_MODIFIER": "(torch) ",
    }


def test_variables_of_the_shell_itself_are_not_taken_over(conda: Installation, environment: dict[str, str]) -> None:
    environment |= {"SHLVL": "7", "_": "/bin/me", "LC_CTYPE": "C"}
    after = activate_environment("torch", environment)
    assert (after["SHLVL"], after["_"], after["LC_CTYPE"]) == ("7", "/bin/me", "C")
    assert "OLDPWD" not in after


@pytest.mark.parametrize(
    ("tool", "by"),
    [("conda", "CONDA_EXE"), ("conda", "PATH"), ("conda", "home"),
     *((tool, by) for tool in ("micromamba", "mamba") for by in ("MAMBA_EXE", "PATH"))],
)  # fmt: skip
def test_conda_mamba_and_micromamba_are_found(tmp_path: Path, environment: dict[str, str], tool: str, by: str) -> None:
    installed = Installation(tmp_path / "home" / "miniforge3" if by == "home" else tmp_path / "somewhere", tool)
    installed.add("torch")
    if by == "PATH":
        environment["PATH"] += f":{installed.tool.parent}"
    elif by != "home":
        environment[by] = str(installed.tool)
    assert activate_environment("torch", environment)["CONDA_DEFAULT_ENV"] == "torch"


def test_the_tool_that_knows_the_environment_activates_it(tmp_path: Path, environment: dict[str, str]) -> None:
    first, second = Installation(tmp_path / "first"), Installation(tmp_path / "second", "micromamba")
    first.add("other")
    prefix = second.add("torch")
    environment |= {"CONDA_EXE": str(first.tool), "MAMBA_EXE": str(second.tool)}
    assert activate_environment("torch", environment)["CONDA_PREFIX"] == str(prefix)


def test_an_environment_has_a_path_too(tmp_path: Path, conda: Installation, environment: dict[str, str]) -> None:
    (tmp_path / "my env" / "conda-meta").mkdir(parents=True)
    assert activate_environment(f"{tmp_path}/my env", environment)["CONDA_PREFIX"] == f"{tmp_path}/my env"


def test_another_environment_is_left_first(conda: Installation, environment: dict[str, str]) -> None:
    first, second = conda.add("first"), conda.add("second")
    conda.hook("first", "export MARK=first")
    conda.hook("first", "unset MARK", kind="deactivate")
    after = activate_environment("second", activate_environment("first", environment))
    assert (after["CONDA_SHLVL"], after["CONDA_PREFIX_1"], after["CONDA_PREFIX"]) == ("2", str(first), str(second))
    assert after["PATH"] == f"{second}/bin:{os.defpath}"
    assert "MARK" not in after


def test_a_hook_may_leave_something_running(conda: Installation, environment: dict[str, str], tmp_path: Path) -> None:
    go_on = tmp_path / "pipe"
    os.mkfifo(go_on)
    conda.hook("torch", f"export MARK=set; cat '{go_on}' &\n")
    assert activate_environment("torch", environment, timeout_s=30)["MARK"] == "set"
    go_on.write_text("now it ends")


@pytest.mark.parametrize("text", ["echo it is broken >&2; exit 3", "set -e; echo it is broken >&2; false"])
def test_a_hook_that_ends_the_shell_is_an_error(conda: Installation, environment: dict[str, str], text: str) -> None:
    conda.hook("torch", text)
    with pytest.raises(EnvironmentFault, match=r"'torch' cannot be activated; .* says: it is broken") as caught:
        activate_environment("torch", environment)
    assert "activate.d" in str(caught.value.hint)


def test_a_hook_that_hangs_is_ended(conda: Installation, environment: dict[str, str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    conda.hook("torch", f"echo $$ > '{tmp_path}/pid'; read nothing < '{tmp_path}/pipe'")
    begun = tmp_path / "pid"
    for timeout_s in (2, 8, 32):  # on a slow machine the hook may not start within the first
        with pytest.raises(EnvironmentFault, match=f"was not activated within {timeout_s} s"):
            activate_environment("torch", environment, timeout_s=timeout_s)
        if begun.exists() and begun.read_text():
            break
    pid = int(begun.read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_missing_environment_is_reported_with_others(conda: Installation, environment: dict[str, str]) -> None:
    conda.add("jax")
    with pytest.raises(UserError, match="there is no conda environment 'trch'") as caught:
        activate_environment("trch", environment)
    assert caught.value.hint == "there are: base, jax, torch"


def test_a_failing_conda_is_reported_with_its_message(conda: Installation, environment: dict[str, str]) -> None:
    write_executable(conda.tool, "#!/bin/sh\necho 'ModuleNotFoundError: conda' >&2\nexit 1\n")
    with pytest.raises(EnvironmentFault, match=r"'torch' cannot be activated; .*ModuleNotFoundError: conda") as caught:
        activate_environment("torch", environment)
    assert f"try `{conda.tool} run -n torch env`" in str(caught.value.hint)
    write_executable(conda.tool, "no program at all")
    with pytest.raises(EnvironmentFault, match="Exec format error"):
        activate_environment("torch", environment)


def test_a_missing_conda_is_reported(environment: dict[str, str]) -> None:
    with pytest.raises(UserError, match="conda, mamba and micromamba were not found") as caught:
        activate_environment("torch", environment)
    assert "CONDA_EXE" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["$(touch x)", "a b", "it's", "`touch x`", "größe"])
def test_a_name_is_never_interpreted_by_a_shell(
    conda: Installation, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no conda environment"):
        activate_environment(name, environment)
    assert not (tmp_path / "x").exists()


def test_an_option_is_not_accepted_as_an_environment(conda: Installation, environment: dict[str, str]) -> None:
    with pytest.raises(UserError, match="cannot be the name of an environment"):
        activate_environment("--help", environment)
