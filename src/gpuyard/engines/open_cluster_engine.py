"""Finds and opens cluster engines: Slurm, Ray, and those of installed plugins.

A plugin is an entry point of the group `gpuyard.engines` under the engine's name: a function that takes a Context and
returns a `ports.Engine`. `gpuyard doctor` lists a plugin that fails to load; nothing else is affected.
"""

import secrets
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct

from gpuyard.config import ClusterConfig, RayConfig, SlurmConfig, load_config
from gpuyard.errors import EnvironmentFault, GpuyardError, UserError
from gpuyard.ports import Engine
from gpuyard.system.file_locks import lock
from gpuyard.system.files_outside_home import CLUSTER, record_outside
from gpuyard.system.private_files import open_own
from gpuyard.system.user_directories import shared_directory, state_directory

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from gpuyard.engines.cluster.ray_site import RaySite
    from gpuyard.engines.cluster.site_checks import NodeCheck
    from gpuyard.engines.cluster.slurm_site import SlurmSite

GROUP = "gpuyard.engines"
LOCAL = "local"
_OWN = ("slurm", "ray")


class Context(Struct, frozen=True, kw_only=True):
    """What an engine is opened with. It may call `on_news` from any thread when it has something to report."""

    name: str
    folder: Path
    on_news: Callable[[], None]


Opener: TypeAlias = Callable[[Context], Engine]


class Checked(Struct, frozen=True, kw_only=True):
    """An engine as `gpuyard doctor` lists it."""

    name: str
    problem: str | None = None  # why it cannot be used
    is_absent: bool = False  # it is not installed
    is_unreachable: bool = False  # its cluster does not answer now


def names() -> list[str]:
    return list(dict.fromkeys([LOCAL, *_OWN, *(each.name for each in _plugins())]))


def log_folders(queue: Path) -> list[Path]:
    folders = [queue, *(cluster_folder(name, queue) for name in _OWN)]
    return list(dict.fromkeys(folder / "logs" for folder in folders))


def cluster_folder(name: str, queue: Path) -> Path:
    """Return the folder of a cluster engine, which its nodes see: for Slurm and Ray the configured one, else the user's
    folder on a shared disk; else the queue's own. Queues that share a folder, one per login node, have subfolders."""
    if name not in _OWN:
        return queue
    named = _settings(name).folder or (shared_directory() if str(queue) == state_directory() else None)
    return queue if named is None or named == str(queue) else Path(named).expanduser() / _queue_name(queue)


def _settings(name: str) -> ClusterConfig:
    config = load_config()
    return config.slurm if name == "slurm" else config.ray


def check_name(name: str) -> None:
    if name == LOCAL or name in _OWN:
        return  # searching for plugins takes a while
    known = names()
    if name not in known:
        raise UserError(f"there is no engine '{name}'", hint=f"there are: {', '.join(known)}")


def open_engine(context: Context) -> Engine:
    """Raises EnvironmentFault if the engine cannot be loaded."""
    if context.name not in _OWN:
        return _load(context.name)(context)
    from gpuyard.engines.cluster.engine import ClusterEngine

    settings, folder = _settings(context.name), cluster_folder(context.name, context.folder)
    if folder != context.folder:
        record_outside(context.folder, CLUSTER, [folder])
    return ClusterEngine(_open_site(settings), folder, context.on_news, poll_s=settings.poll_s)


def check_engines() -> Iterator[Checked]:
    from gpuyard.engines.cluster.site_checks import WITHIN_S, unreachable_sites

    unreachable = {}
    try:
        unreachable = unreachable_sites({name: partial(_open_site, _settings(name), WITHIN_S) for name in _installed()})
    except GpuyardError as error:
        yield Checked(name="all", problem=error.with_hint)
    for name in names():
        if name == "slurm" and shutil.which("sbatch") is None:
            yield Checked(name=name, problem="there is no sbatch on PATH", is_absent=True)
        elif name in unreachable:
            yield Checked(name=name, problem=f"cannot be reached: {unreachable[name]}", is_unreachable=True)
        elif name in _OWN:
            yield Checked(name=name)
        elif name != LOCAL:
            problem = None
            try:
                _load(name)
            except EnvironmentFault as error:
                problem = str(error)
            yield Checked(name=name, problem=problem)


def site_to_ask(name: str) -> "SlurmSite | RaySite | None":
    """Return a site that answers within a few seconds, for `SubmissionCheck`; None where it cannot be asked."""
    from gpuyard.engines.cluster.site_checks import WITHIN_S

    return _open_site(_settings(name), WITHIN_S) if name in _installed() else None


def _installed() -> list[str]:
    return [name for name in _OWN if name != "slurm" or shutil.which("sbatch") is not None]


def check_cluster_nodes(name: str, queue: Path, cwd: str) -> "list[NodeCheck]":
    from gpuyard.engines.cluster.site_checks import NODE_WITHIN_S, check_nodes

    settings, limit_s = _settings(name), 2 * NODE_WITHIN_S if name == "slurm" else None
    return check_nodes(partial(_open_site, settings, limit_s), cluster_folder(name, queue), cwd, settings.card_mb)


def _load(name: str) -> Opener:
    """Return the function of a plugin."""
    found = next((each for each in _plugins() if each.name == name), None)
    if found is None:
        raise EnvironmentFault(f"the engine {name} is not installed here", hint="install the package that provides it")
    try:
        opener: Opener = found.load()
    except Exception as error:
        why = f"the engine {name} ({found.value}) cannot be loaded: {type(error).__name__}: {error}"
        raise EnvironmentFault(why, hint="fix or remove the package that provides it") from error
    if not callable(opener):
        raise EnvironmentFault(f"the engine {name} ({found.value}) is not a function")
    return opener


def _plugins() -> "list[EntryPoint]":
    from importlib import metadata  # takes 12 ms

    return [each for each in metadata.entry_points(group=GROUP) if each.name not in (LOCAL, *_OWN)]


def _open_site(settings: ClusterConfig, limit_s: float | None = None) -> "SlurmSite | RaySite":
    """Open Slurm or Ray; `limit_s` is the most that a request may take, by default the site's own limit."""
    if isinstance(settings, SlurmConfig):
        from gpuyard.engines.cluster.slurm_site import SlurmSite

        return SlurmSite(settings, limit_s=limit_s)
    from gpuyard.engines.cluster.ray_site import RaySite

    assert isinstance(settings, RayConfig)
    return RaySite(settings, limit_s=limit_s)


def _queue_name(queue: Path) -> str:
    path = queue / "name"
    try:
        with open(open_own(str(path)), "r+", encoding="ascii") as file:
            lock(file.fileno())
            name = file.read()
            if not name:
                name = f"queue-{secrets.token_hex(4)}"
                file.write(name)
            return name
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be written or read: {error.strerror}") from error
