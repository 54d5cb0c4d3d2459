"""`gpuyard doctor --engine`: what is wrong on each node of a cluster, and how to mend it."""

import os
from collections import Counter
from pathlib import Path

from msgspec import to_builtins

from gpuyard.connect import paths
from gpuyard.core.units import format_count, format_size
from gpuyard.engines.cluster.node_check import NodeCheck
from gpuyard.engines.registry import check_cluster_nodes
from gpuyard.ui.cli.terminal import paint, say, say_json


def check_cluster(engine: str, *, as_json: bool) -> int:
    """Print the result for each node, and return the exit status."""
    checks = check_cluster_nodes(engine, Path(paths.state_folder()), os.getcwd())
    is_healthy = bool(checks) and not any(each.problems for each in checks)
    if as_json:
        say_json({"engine": engine, "nodes": to_builtins(checks), "healthy": is_healthy})
    else:
        for each in checks:
            fine = "" if each.problems else f" works{_cards(each)}"
            say(f"{paint(each.node, 'red' if each.problems else 'green')}{fine}")
            say(*(f"  {paint('!', 'yellow')} {problem}" for problem in each.problems))
        say("No problems found." if is_healthy else "" if checks else f"{engine} has no nodes.")
    return 0 if is_healthy else 1


def _cards(check: NodeCheck) -> str:
    cards = Counter(check.report.cards_mb if check.report is not None else ())
    return "".join(f", {format_count(count, 'GPU')} of {format_size(mb)}" for mb, count in cards.items())
