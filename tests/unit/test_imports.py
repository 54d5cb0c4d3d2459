"""No modules import each other in a circle, and neither do the rooms."""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"
PACKAGE = "gpuyard"


def modules() -> dict[str, Path]:
    found = {}
    for path in (SRC / PACKAGE).rglob("*.py"):
        parts = path.relative_to(SRC).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, known: Mapping[str, Path], *, in_functions: bool) -> Iterator[str]:
    """Yield the modules that a file imports, also for types alone."""
    for node in statements(ast.parse(path.read_text(encoding="utf-8")), in_functions=in_functions):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from (names & known.keys()) or ({node.module} & known.keys())
        elif isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & known.keys()


def statements(tree: ast.AST, *, in_functions: bool) -> Iterator[ast.AST]:
    yield tree
    for node in ast.iter_child_nodes(tree):
        if in_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from statements(node, in_functions=in_functions)


def graph(*, in_functions: bool) -> dict[str, set[str]]:
    known = modules()
    return {
        name: set(imported(path, known, in_functions=in_functions)) - {name}
        for name, path in known.items()
        if name != PACKAGE
    }


def circle(edges: Mapping[str, set[str]]) -> list[str]:
    """Return the names of a circle, or nothing."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        names: list[str] = error.args[1]
        return names
    return []


def test_modules_import_each_other_in_no_circle() -> None:
    assert circle(graph(in_functions=False)) == []


def test_rooms_import_each_other_in_no_circle() -> None:
    def room(module: str) -> str:
        return module.split(".")[1] if "." in module else module

    rooms: dict[str, set[str]] = {}
    for name, others in graph(in_functions=True).items():
        rooms.setdefault(room(name), set()).update(room(other) for other in others if other != PACKAGE)
    assert circle({name: others - {name} for name, others in rooms.items()}) == []
