"""Check every node of a cluster by a job there: does it see our folder, our Python and a working directory, is its
clock right, and do its GPUs have the configured memory? For `gpuyard doctor --engine`.

The job is a shell script, which needs nothing of ours: what the script prints comes back through the site, as the node
may not see our folder. All nodes are asked at once, each within a minute.
"""

import contextlib
import os
import secrets
import shlex
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from gpuyard.core.printable_text import LONGEST_MESSAGE, printable
from gpuyard.core.units import format_duration, format_size
from gpuyard.engines.cluster.site import ClusterNode
from gpuyard.errors import EnvironmentFault
from gpuyard.system.python_command import python_command

NODE_WITHIN_S = 40.0
_REPORT = "gpuyard.cluster_node.node_programs"
_SIMULATE = "GPUYARD_SIMULATE"
_CLOCK_ERROR_S = 2.0
# Drivers report a little less than what is sold.
_LEAST_PART = 0.98
_MOST_AT_ONCE = 64


class CheckedSite(Protocol):
    """A site that can be asked about its nodes. Each call may raise SiteUnreachable or SiteRefused."""

    name: str

    def nodes(self) -> list[ClusterNode]:
        """Return all nodes that jobs may get."""

    def run_on(self, node: ClusterNode, script: str, within_s: float) -> str:
        """Run a shell script on this node, with a GPU if it has one, and return what it printed."""


class NodeReport(Struct, frozen=True, kw_only=True):
    at: float
    has_cwd: bool
    cards_mb: tuple[float, ...] = ()


class NodeCheck(Struct, frozen=True, kw_only=True):
    """What was found on a node. `problems` say how to mend them; there is no report from a node that cannot make it."""

    node: str
    problems: tuple[str, ...]
    report: NodeReport | None = None


def check_nodes(
    open_site: Callable[[], CheckedSite], folder: Path, cwd: str, card_mb: float | None, within_s: float = NODE_WITHIN_S
) -> list[NodeCheck]:
    """Check each node. `folder` is the engine's, and `card_mb` the configured memory of its GPUs. Each node gets a site
    of its own, as a site is for one thread."""
    nodes = open_site().nodes()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".check-", dir=folder) as name:
        token = secrets.token_hex(8)
        Path(name, "token").write_text(token)

        def check(node: ClusterNode) -> NodeCheck:
            site = open_site()
            begun, begun_at = time.monotonic(), time.time()
            try:
                lines = [] if node.trouble else site.run_on(node, _script(Path(name), cwd), within_s).splitlines()
            except EnvironmentFault as error:
                why = f"no job ran there: {error}{f' ({error.hint})' if error.hint else ''}"
                return NodeCheck(node=node.place, problems=(why,))
            if node.trouble:
                return NodeCheck(node=node.place, problems=(node.trouble,))
            problems = _folder_problems(lines, folder, token, site.name)
            report = next((_report_of(line) for line in lines if line.startswith("report=")), None)
            if report is None:
                return NodeCheck(node=node.place, problems=(*problems, _no_report(lines)))
            off_s = report.at - min(max(report.at, begun_at), begun_at + time.monotonic() - begun)
            problems += [*_clock_problems(off_s), *_problems_of(report, cwd, card_mb, site.name)]
            return NodeCheck(node=node.place, problems=tuple(problems), report=report)

        with ThreadPoolExecutor(max_workers=min(_MOST_AT_ONCE, max(1, len(nodes)))) as pool:
            return list(pool.map(check, nodes))


def _no_report(lines: Sequence[str]) -> str:
    says = next((line for line in reversed(lines) if line.strip() and not line.startswith("folder=")), "no output")
    hint = "install gpuyard in a folder that all nodes see at the same path"
    return f"cannot run {python_command(_REPORT)[0]}: {printable(says.strip(), LONGEST_MESSAGE)} ({hint})"


def _clock_problems(off_s: float) -> list[str]:
    if abs(off_s) <= _CLOCK_ERROR_S:
        return []
    direction = "ahead of" if off_s > 0 else "behind"
    return [f"its clock is {format_duration(abs(off_s))} {direction} this machine's: set it by NTP"]


def _script(folder: Path, cwd: str) -> str:
    token, mark = shlex.quote(f"{folder}/token"), shlex.quote(f"{folder}/written-")
    simulated = f"{_SIMULATE}={shlex.quote(os.environ[_SIMULATE])} " if _SIMULATE in os.environ else ""
    report = simulated + shlex.join(python_command(_REPORT, "report", cwd))
    return (
        f'exec 2>&1; cd /; echo "folder=$(cat {token} 2>/dev/null)"; '
        f"(: >{mark}$$) 2>/dev/null && echo folder=written; {report}"
    )


def _folder_problems(lines: Sequence[str], folder: Path, token: str, site: str) -> list[str]:
    if f"folder={token}" not in lines:
        hint = f"mount the same file system there, or name a folder that all nodes see as `folder` in [{site}]"
        return [f"does not see {folder} ({hint})"]
    if "folder=written" not in lines:
        return [f"cannot write to {folder} (mount it for writing there, with the same user ids as here)"]
    return []


def _report_of(line: str) -> NodeReport | None:
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(line.partition("=")[2].encode(), type=NodeReport)
    return None


def _problems_of(report: NodeReport, cwd: str, card_mb: float | None, site: str) -> list[str]:
    problems = []
    if not report.has_cwd:
        problems.append(f"does not see the working directory {cwd} (submit from a folder that all nodes see)")
    least_mb = min(report.cards_mb, default=None)
    if card_mb is not None and least_mb is not None and least_mb < card_mb * _LEAST_PART:
        has, configured = format_size(least_mb), format_size(card_mb)
        problems.append(f"has a GPU of {has}, but `gpu_memory` in [{site}] is {configured}: lower that")
    return problems
