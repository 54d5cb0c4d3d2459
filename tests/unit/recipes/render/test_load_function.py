"""A user's function: found as `python -m` would find it, and refused with a reason if it cannot be called."""

import itertools
from pathlib import Path

import pytest

from gpuyard.errors import UserError
from gpuyard.ui.cli.recipes.render import LOADER, RENDERER, find_function

_numbers = itertools.count()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module in the current directory that is not imported yet."""
    name = f"a_users_module_{next(_numbers)}"
    (tmp_path / f"{name}.py").write_text(
        "def render(scene, frames, label, out_dir): return 'rendered'\n"
        "def any(*args, **kwargs): pass\n"
        "def short(scene, label): pass\n"
        "def keyword(scene, frames, label, *, out_dir): pass\n"
        "async def later(scene, frames, label, out_dir): pass\n"
        "def generator(scene, frames, label, out_dir): yield\n"
        "class Renderer:\n"
        "    def render(self, scene, frames, label, out_dir): pass\n"
        "    def __call__(self, scene, frames, label, out_dir): pass\n"
        "made = Renderer()\n"
        "value = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/nowhere")  # so that additions to the path are undone after the test
    return name


@pytest.mark.parametrize("function", ["render", "any", "made", "made.render"])
def test_a_callable_with_four_arguments_is_found_in_the_current_directory(module: str, function: str) -> None:
    found = find_function("--renderer", f"{module}:{function}", RENDERER)
    assert found(None, [], {}, Path()) == ("rendered" if function == "render" else None)


@pytest.mark.parametrize(
    ("function", "message", "hint"),
    [
        ("rendr", "has no 'rendr'", "did you mean 'render'?"),
        ("value", "is not a function but int", None),
        ("short", r"takes \(scene, label\)", "it is called as short(scene, frames, label, out_dir)"),
        ("keyword", "takes", "it is called as keyword(scene, frames, label, out_dir)"),
        ("Renderer.render", "takes", "it is called as Renderer.render(scene, frames, label, out_dir)"),
        ("later", "is a coroutine or a generator", "make it a plain function"),
        ("generator", "is a coroutine or a generator", "make it a plain function"),
    ],
)
def test_a_function_with_a_wrong_signature_is_refused(
    module: str, function: str, message: str, hint: str | None
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        find_function("--renderer", f"{module}:{function}", RENDERER)
    assert caught.value.hint == hint


def test_a_function_without_a_signature_is_accepted() -> None:
    assert find_function("--loader", "builtins:iter", LOADER) is iter


@pytest.mark.parametrize("text", ["", "render", ":", "render:", ":render"])
def test_text_other_than_module_colon_function_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is not MODULE:FUNCTION"):
        find_function("--renderer", text, RENDERER)


@pytest.mark.parametrize("text", ["pkg/render.py:f", "./pkg/render:f"])
def test_a_file_is_refused_with_the_name_of_its_module(text: str) -> None:
    with pytest.raises(UserError, match="not a file") as caught:
        find_function("--renderer", text, RENDERER)
    assert caught.value.hint == "try pkg.render:f"


@pytest.mark.parametrize(
    ("text", "missing"), [("no_such_module:f", "no_such_module"), ("json.nothing:f", "json.nothing")]
)
@pytest.mark.usefixtures("module")
def test_a_missing_module_is_named(text: str, missing: str) -> None:
    with pytest.raises(UserError, match=f"there is no module '{missing}'"):
        find_function("--loader", text, LOADER)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("import no_such_library", r"cannot import \w+: ModuleNotFoundError: No module named 'no_such_library'"),
        ("from json import nothing", r"cannot import \w+: ImportError: cannot import name 'nothing'"),
        ("1 / 0", r"cannot import \w+: ZeroDivisionError"),
        ("raise SystemExit(3)", r"cannot import \w+: SystemExit: 3"),
        ("def f(:", r"cannot import \w+: SyntaxError"),
    ],
)
def test_an_error_raised_by_the_module_is_shown(module: str, content: str, message: str) -> None:
    Path("broken_one.py").write_text(f"\n{content}\n")
    with pytest.raises(UserError, match=message) as caught:
        find_function("--loader", "broken_one:f", LOADER)
    assert "broken_one.py, line 2" in f"{caught.value.message} {caught.value.hint}"
