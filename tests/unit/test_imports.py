"""What the source keeps to: no circles of imports, few broad excepts, one meaning per class name."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"
PACKAGE = "gpuyard"
CATCH_ALL = {
    "queue/engine_set.py", "daemon/api/routes.py", "daemon/loop.py", "daemon/main.py",
    "daemon/monitor/sampling.py", "daemon/retention.py", "engines/cluster/engine.py",
    "engines/open_cluster_engine.py", "probes/fallback_chain.py", "recipes/render/memory/assets_in_use.py",
}  # fmt: skip
# Names of classes that stand for the same idea in two places. None does at present.
SHARED: set[str] = set()


@cache
def nodes(*, in_functions: bool) -> dict[Path, list[ast.AST]]:
    """Return the nodes of each file of the package."""

    def below(tree: ast.AST) -> Iterator[ast.AST]:
        yield tree
        for node in ast.iter_child_nodes(tree):
            if in_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from below(node)

    paths = (SRC / PACKAGE).rglob("*.py")
    return {path: list(below(ast.parse(path.read_text(encoding="utf-8")))) for path in paths}


def module_of(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def graph(*, in_functions: bool) -> dict[str, set[str]]:
    """Return the modules that each module imports, also for types alone."""
    files = {module_of(path): found for path, found in nodes(in_functions=in_functions).items()}
    edges: dict[str, set[str]] = {name: set() for name in files if name != PACKAGE}
    for name in edges:
        for node in files[name]:
            if isinstance(node, ast.ImportFrom) and node.module:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                edges[name] |= (names & files.keys()) or ({node.module} & files.keys())
            elif isinstance(node, ast.Import):
                edges[name] |= {alias.name for alias in node.names} & files.keys()
    return {name: others - {name} for name, others in edges.items()}


def circle(edges: Mapping[str, set[str]]) -> list[str]:
    """Return the names of a circle, or nothing."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        names: list[str] = error.args[1]
        return names
    return []


def test_modules_and_rooms_import_each_other_in_no_circle() -> None:
    def room(module: str) -> str:
        return module.split(".")[1] if "." in module else module

    assert circle(graph(in_functions=False)) == []
    rooms: dict[str, set[str]] = {}
    for name, others in graph(in_functions=True).items():
        rooms.setdefault(room(name), set()).update(room(other) for other in others if other != PACKAGE)
    assert circle({name: others - {name} for name, others in rooms.items()}) == []


def test_every_exception_is_caught_only_where_the_decision_says() -> None:
    found = {
        path.relative_to(SRC / PACKAGE).as_posix()
        for path, all_nodes in nodes(in_functions=True).items()
        for node in all_nodes
        if isinstance(node, ast.ExceptHandler)
        if node.type is None or (isinstance(node.type, ast.Name) and node.type.id == "Exception")
    }
    assert found == CATCH_ALL


def test_a_class_name_is_defined_once_unless_it_is_listed() -> None:
    names = [
        each.name for found in nodes(in_functions=True).values() for each in found if isinstance(each, ast.ClassDef)
    ]
    twice = {name for name in names if names.count(name) > 1}
    assert twice == SHARED, "give one of them a name of its own, or list it above with the idea that they share"
