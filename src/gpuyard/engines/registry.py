"""Which engines there are that place work themselves: Slurm, Ray, and whatever else is installed.

Somebody else's is an entry point of the group `gpuyard.engines`, whose name is the engine's: a function that takes a
Context and returns a `ports.Engine`. One that fails to load is listed by `gpuyard doctor`, and harms nothing else.
"""

import contextlib
import secrets
import shutil
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from gpuyard.config import ClusterConfig, load_config
from gpuyard.engines.cluster.engine import ClusterEngine
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.ports import Engine

GROUP = "gpuyard.engines"
LOCAL = "local"


class Context(Struct, frozen=True, kw_only=True):
    """What an engine is opened with: a folder for its things, and whom to call, from any thread, when it has news."""

    name: str
    folder: Path
    on_news: Callable[[], None]


Opener: TypeAlias = Callable[[Context], Engine]


class Checked(Struct, frozen=True, kw_only=True):
    """An engine as `gpuyard doctor` lists it; `problem` is why it cannot be used, if so, and `is_absent` that it was
    merely never installed."""

    name: str
    problem: str | None = None
    is_absent: bool = False


def names() -> list[str]:
    return list(dict.fromkeys([LOCAL, *_OWN, *(each.name for each in _others())]))


def log_folders(queue: Path) -> list[Path]:
    """Where logs of jobs are kept: the queue's own folder, and those that nodes see."""
    config = load_config()
    folders = [queue, *(_folder(queue, said) for said in (config.slurm, config.ray))]
    return list(dict.fromkeys(folder / "logs" for folder in folders))


def check_name(name: str) -> None:
    if name == LOCAL or name in _OWN:
        return  # to look for others' takes a while
    known = names()
    if name not in known:
        raise UserError(f"there is no engine '{name}'", hint=f"there are: {', '.join(known)}")


def open_engine(context: Context) -> Engine:
    """EnvironmentFault where it cannot be loaded."""
    return _load(context.name)(context)


def check_engines() -> Iterator[Checked]:
    try:
        load_config()
    except UserError as error:
        yield Checked(name="all", problem=f"{error}{f' ({error.hint})' if error.hint else ''}")
    for name in names():
        if name in _NEEDS:
            yield _check_own(name)
        elif name != LOCAL:
            yield _check_other(name)


def _check_own(name: str) -> Checked:
    what, is_there = _NEEDS[name]
    return Checked(name=name) if is_there() else Checked(name=name, problem=f"there is no {what}", is_absent=True)


def _check_other(name: str) -> Checked:
    try:
        _load(name)
    except EnvironmentFault as error:
        return Checked(name=name, problem=str(error))
    return Checked(name=name)


def _load(name: str) -> Opener:
    own = _OWN.get(name)
    if own is not None:
        return own
    found = next((each for each in _others() if each.name == name), None)
    if found is None:
        raise EnvironmentFault(f"the engine {name} is not installed here", hint="install what brings it")
    try:
        opener: Opener = found.load()
    except Exception as error:
        raise EnvironmentFault(
            f"the engine {name} ({found.value}) cannot be loaded: {type(error).__name__}: {error}",
            hint="see to the package that brings it",
        ) from error
    if not callable(opener):
        raise EnvironmentFault(f"the engine {name} ({found.value}) is no function that opens one")
    return opener


def _others() -> list[metadata.EntryPoint]:
    return [each for each in metadata.entry_points(group=GROUP) if each.name not in (LOCAL, *_OWN)]


# Our own


def _open_slurm(context: Context) -> Engine:
    from gpuyard.engines.cluster.slurm_commands import SlurmSettings
    from gpuyard.engines.cluster.slurm_site import SlurmSite

    said = load_config().slurm
    settings = SlurmSettings(
        partition=said.partition,
        account=said.account,
        qos=said.qos,
        options=said.options,
        shard_mb=said.shard_mb,
        card_mb=said.card_mb,
        nice_base=said.nice_base,
        most_jobs=said.most_jobs,
    )
    return ClusterEngine(SlurmSite(settings), _folder(context.folder, said), context.on_news, poll_s=said.poll_s)


def _open_ray(context: Context) -> Engine:
    from gpuyard.engines.cluster.ray_api import RaySettings
    from gpuyard.engines.cluster.ray_site import RaySite

    said = load_config().ray
    settings = RaySettings(address=said.address, card_mb=said.card_mb, most_jobs=said.most_jobs)
    return ClusterEngine(RaySite(settings), _folder(context.folder, said), context.on_news, poll_s=said.poll_s)


def _folder(queue: Path, said: ClusterConfig) -> Path:
    """One that nodes see may be seen by several queues as well, one on each login node: each has its own in there."""
    if said.folder is None:
        return queue
    return Path(said.folder).expanduser() / _name_of_queue(queue)


def _name_of_queue(queue: Path) -> str:
    """Made up once, and kept with the queue."""
    path = queue / "name"
    try:
        if not path.exists():
            with contextlib.suppress(FileExistsError), path.open("x") as file:
                file.write(f"queue-{secrets.token_hex(4)}")
        return path.read_text()
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be written or read: {error.strerror}") from error


_OWN: dict[str, Opener] = {"slurm": _open_slurm, "ray": _open_ray}
_NEEDS: dict[str, tuple[str, Callable[[], bool]]] = {
    "slurm": ("sbatch on PATH", lambda: shutil.which("sbatch") is not None),
    "ray": ("", lambda: True),
}
