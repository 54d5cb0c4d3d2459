"""Questions to a cluster before work goes there: whether it answers (`gpuyard doctor`), whether any node can ever
take a job (`submit`, `edit`), and what is wrong on each node (`gpuyard doctor --engine`).
"""

import contextlib
import os
import secrets
import shlex
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpuyard.engines.cluster.site import ClusterNode, Site, SiteRefused, SiteUnreachable
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.cluster_terms import ClusterTerms
from gpuyard.model.job_spec import JobSpec
from gpuyard.model.printable_text import LONGEST_MESSAGE, printable
from gpuyard.model.units import format_duration, format_size
from gpuyard.system.processes import python_command

# Of each request: longer than a busy controller takes, and short enough for someone who waits.
WITHIN_S = 5.0
_TO_REPORT_S = 1.0


def unreachable_sites(openers: Mapping[str, Callable[[], Site]]) -> dict[str, str]:
    """Return why sites cannot be reached, by name, within 6 s: one that hangs is left to its thread."""
    found: dict[str, str | None] = dict.fromkeys(openers, f"no answer within {WITHIN_S:.0f} s")

    def ask(name: str) -> None:
        try:
            openers[name]().report(())
            found[name] = None
        except EnvironmentFault as error:
            found[name] = error.with_hint

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in openers]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + WITHIN_S + _TO_REPORT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return {name: problem for name, problem in found.items() if problem is not None}


class CheckingSite(Protocol):
    def check(self, terms: ClusterTerms) -> None:
        """Raise SiteRefused if no node can ever take a job on these terms, SiteUnreachable if that is unknown."""


class SubmissionCheck:
    """For several threads. `open_site` returns None for an engine that cannot be asked, such as a plugin's."""

    def __init__(self, open_site: Callable[[str], CheckingSite | None]) -> None:
        self._open_site = open_site
        self._lock = threading.Lock()
        self._good_until: dict[tuple[str, ClusterTerms | None], float] = {}  # None: the site cannot be reached

    def check(self, spec: JobSpec) -> None:
        """Raise UserError if no node of the job's cluster can ever take it. An answer counts for a minute."""
        engine, terms, now = spec.engine, terms_of(spec), time.monotonic()
        with self._lock:
            self._good_until = {key: until for key, until in self._good_until.items() if now < until}
            if (engine, terms) in self._good_until or (engine, None) in self._good_until:
                return
        good: ClusterTerms | None = terms
        try:
            site = self._open_site(engine)
            if site is not None:
                site.check(terms)
        except SiteRefused as error:
            raise UserError(str(error), hint=error.hint, code="impossible") from error
        except (SiteUnreachable, EnvironmentFault):  # its engine gives the reason while the job waits
            good = None
        with self._lock:
            self._good_until[engine, good] = time.monotonic() + 60.0


def terms_of(spec: JobSpec) -> ClusterTerms:
    """Return what is declared of a job's need; its name and its place in the queue do not decide who can take it."""
    need = replace(spec.need, host=None)
    return ClusterTerms(
        need=need, name="", cpus=spec.cpus, ram_mb=spec.need.ram_mb, limit_s=spec.time_limit_s,
        options=spec.engine_options,
    )  # fmt: skip


NODE_WITHIN_S = 40.0
_REPORT = "gpuyard.cluster_node.node_programs"


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
    """Check each node, by a site of its own, as a site is for one thread. `folder` is the engine's."""
    nodes = open_site().nodes()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".check-", dir=folder) as name:
        token = secrets.token_hex(8)
        Path(name, "token").write_text(token)

        def check(node: ClusterNode) -> NodeCheck:
            if node.trouble:
                return NodeCheck(node=node.place, problems=(node.trouble,))
            site = open_site()
            begun, begun_at = time.monotonic(), time.time()
            try:
                lines = site.run_on(node, _script(Path(name), cwd), within_s).splitlines()
            except EnvironmentFault as error:
                return NodeCheck(node=node.place, problems=(f"no job ran there: {error.with_hint}",))
            problems, report = [], None
            if f"folder={token}" not in lines:
                hint = "mount the same file system there, or name a folder that all nodes see as `folder` in "
                problems.append(f"does not see {folder} ({hint}[{site.name}])")
            elif "folder=written" not in lines:
                problems.append(
                    f"cannot write to {folder} (mount it for writing there, with the same user ids as here)"
                )
            with contextlib.suppress(StopIteration, msgspec.MsgspecError):
                line = next(line for line in lines if line.startswith("report="))
                report = msgspec.json.decode(line.partition("=")[2].encode(), type=NodeReport)
                off_s = report.at - min(max(report.at, begun_at), begun_at + time.monotonic() - begun)
                problems += _problems_of(report, off_s, cwd, card_mb, site.name)
            if report is None:
                says = [line.strip() for line in lines if line.strip() and not line.startswith("folder=")]
                why = printable(says[-1] if says else "no output", LONGEST_MESSAGE)
                hint = "install gpuyard in a folder that all nodes see at the same path"
                problems.append(f"cannot run {python_command(_REPORT)[0]}: {why} ({hint})")
            return NodeCheck(node=node.place, problems=tuple(problems), report=report)

        with ThreadPoolExecutor(max_workers=min(64, max(1, len(nodes)))) as pool:
            return list(pool.map(check, nodes))


def _problems_of(report: NodeReport, off_s: float, cwd: str, card_mb: float | None, site: str) -> Iterator[str]:
    """`off_s` is by how much the clock of the node is ahead of ours."""
    if abs(off_s) > 2.0:
        direction = "ahead of" if off_s > 0 else "behind"
        yield f"its clock is {format_duration(abs(off_s))} {direction} this machine's: set it by NTP"
    if not report.has_cwd:
        yield f"does not see the working directory {cwd} (submit from a folder that all nodes see)"
    least_mb = min(report.cards_mb, default=None)
    if card_mb is not None and least_mb is not None and least_mb < card_mb * 0.98:  # drivers report a little less
        has, configured = format_size(least_mb), format_size(card_mb)
        yield f"has a GPU of {has}, but `gpu_memory` in [{site}] is {configured}: lower that"


def _script(folder: Path, cwd: str) -> str:
    token, mark = shlex.quote(f"{folder}/token"), shlex.quote(f"{folder}/written-")
    devices = os.environ.get("GPUYARD_SIMULATE")
    simulated = "" if devices is None else f"GPUYARD_SIMULATE={shlex.quote(devices)} "
    report = simulated + shlex.join(python_command(_REPORT, "report", cwd))
    return (
        f'exec 2>&1; cd /; echo "folder=$(cat {token} 2>/dev/null)"; '
        f"(: >{mark}$$) 2>/dev/null && echo folder=written; {report}"
    )
