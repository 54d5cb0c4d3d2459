"""Import a user's function, given as `module:function`, and check its signature before any asset is loaded."""

import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from gpuyard.errors import UserError

RENDERER = ("scene", "frames", "label", "out_dir")
LOADER = ("path",)


def find_function(option: str, text: str, called_with: tuple[str, ...]) -> Callable[..., Any]:
    """Return the function. As with `python -m`, the current directory is searched first."""
    module_name, colon, function_name = text.partition(":")
    if not colon or not module_name or not function_name:
        raise UserError(f"{option} '{text}' is not MODULE:FUNCTION", hint=f"write it as {option} my_pkg.render:render")
    if module_name.endswith(".py") or "/" in module_name:
        guess = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise UserError(
            f"{option} takes the name of a module, not a file: '{module_name}'", hint=f"try {guess}:{function_name}"
        )
    module = _import(option, module_name)
    function: Any = module
    for part in function_name.split("."):
        if not hasattr(function, part):
            near = difflib.get_close_matches(part, [name for name in dir(function) if not name.startswith("_")], n=1)
            file = getattr(module, "__file__", None)
            hint = f"did you mean '{near[0]}'?" if near else f"the module is {file}" if file else None
            raise UserError(f"{option}: '{module_name}' has no '{function_name}'", hint=hint)
        function = getattr(function, part)
    _check(option, text, function, called_with)
    checked: Callable[..., Any] = function
    return checked


def _import(option: str, name: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            hint = "Python searches the current directory and its installed packages"
            raise UserError(f"{option}: there is no module '{error.name}'", hint=hint) from None
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
        last = next((frame for frame in reversed(frames) if frame.filename != __file__), None)
        where = f"{last.filename}, line {last.lineno}" if last is not None else None
        raise UserError(f"{option}: cannot import {name}: {type(error).__name__}: {error}", hint=where) from error


def _check(option: str, text: str, function: Any, called_with: tuple[str, ...]) -> None:
    if not callable(function):
        raise UserError(f"{option}: {text} is not a function but {type(function).__name__}")
    deferred_kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(is_kind(function) for is_kind in deferred_kinds):
        raise UserError(f"{option}: {text} is a coroutine or a generator", hint="make it a plain function")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have no signature
        return
    try:
        signature.bind(*called_with)
    except TypeError:
        call = f"it is called as {text.partition(':')[2]}({', '.join(called_with)})"
        raise UserError(f"{option}: {text} takes {signature}", hint=call) from None
