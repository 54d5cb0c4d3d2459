"""`except Exception` is allowed in few places only: docs/adr/0044 says where and why."""

import ast
from pathlib import Path

import gpuyard

SOURCE = Path(gpuyard.__file__).parent
ALLOWED = {
    "queue/engine_set.py",
    "daemon/api/routes.py",
    "daemon/loop.py",
    "daemon/main.py",
    "daemon/monitor/sampling.py",
    "daemon/retention.py",
    "engines/cluster/engine.py",
    "engines/open_cluster_engine.py",
    "probes/fallback_chain.py",
    "recipes/render/memory/assets_in_use.py",
}


def catches_everything(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or (isinstance(handler.type, ast.Name) and handler.type.id == "Exception")


def test_every_exception_is_caught_only_where_the_decision_says() -> None:
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ExceptHandler) and catches_everything(node)
    }
    assert found == ALLOWED
