"""`gpuyard export`: writes a script that submits what waits here to Slurm or Ray."""

import os
import sys

from gpuyard.connect.fast_http import connect
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.ui.cli.terminal import note
from gpuyard.ui.cli.text_table import count_text
from gpuyard.ui.cli.verb_options import Arguments, Option, Typed, Verb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuyard.core.cluster.export import ExportedJob
    from gpuyard.recipes.export.script_text import Script

VERB = Verb(
    """Write a script that submits what waits here to Slurm or Ray.

    All that waits is in it, or the jobs that are named: 17, 17-20, name=big, tag=night. FILE may be - for standard
    output. It needs no gpuyard, and holds no values of variables. What it cannot do is told, and stands in it as
    comments. The jobs stay in this queue.

    \b
    gpuyard export slurm submit.sh
    gpuyard export ray - tag=night
    """,
    (Option("force", None, "Write over FILE where it is there already."),),
    Arguments("slurm|ray FILE [IDS]...", is_many=True),
)
_SITES = ("slurm", "ray")


def run(typed: Typed) -> int:
    site, path, ids = _understood(typed.words)
    jobs = _ask(ids)
    script = _script(site, jobs)
    _write(path, script.text, is_forced=typed.flag("force"))
    for line in script.notes:
        note(f"gpuyard: not carried over: {line}")
    for line in _advice(path, jobs):
        note(f"gpuyard: {line}")
    return 0


def _understood(words: list[str]) -> tuple[str, str, str]:
    if len(words) < 2 or words[0] not in _SITES:
        raise UserError("where to, and into which file?", hint="write it as gpuyard export slurm submit.sh")
    return words[0], words[1], " ".join(words[2:])


def _ask(ids: str) -> "list[ExportedJob]":
    import msgspec

    from gpuyard.core.cluster.export import ExportedJob

    with connect(start=True) as queue:
        page = queue.request("GET", "/exports", {"ids": ids})
        found = page["jobs"]
        while page["next"] is not None:
            page = queue.request("GET", "/exports", {"ids": ids, "after": str(page["next"])})
            found += page["jobs"]
    if not found:
        raise UserError("nothing waits in the queue", hint="name jobs to have others in the script")
    return msgspec.convert(found, list[ExportedJob])


def _script(site: str, jobs: "list[ExportedJob]") -> "Script":
    """By the same configuration as the engine of that name goes by."""
    import msgspec

    from gpuyard.config import load_config

    config = load_config()
    if site == "slurm":
        from gpuyard.engines.cluster.slurm_commands import SlurmSettings
        from gpuyard.recipes.export.slurm_script import slurm_script

        settings = msgspec.convert(config.slurm, SlurmSettings, from_attributes=True)
        return slurm_script(jobs, settings, config.queue.tags)
    from gpuyard.engines.cluster.ray_api import RaySettings
    from gpuyard.recipes.export.ray_script import ray_script

    return ray_script(jobs, msgspec.convert(config.ray, RaySettings, from_attributes=True), config.queue.tags)


def _write(path: str, text: str, *, is_forced: bool) -> None:
    """Words of commands need not be text; they are as they were."""
    content = text.encode("utf-8", "surrogateescape")
    if path == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(content)
        return
    how = os.O_TRUNC if is_forced else os.O_EXCL
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | how, 0o755), "wb") as file:
            file.write(content)
            os.chmod(path, 0o755)  # noqa: S103 - a script, to be run by whoever may read it
    except FileExistsError:
        raise UserError(f"'{path}' is there already", hint="name another file, or say --force") from None
    except OSError as error:
        raise EnvironmentFault(f"'{path}' cannot be written: {error.strerror}") from error


def _advice(path: str, jobs: "list[ExportedJob]") -> "list[str]":
    from gpuyard.core.job.lifecycle import FINISHED, LIVE
    from gpuyard.core.job.selection import format_ids

    waiting = [job.id for job in jobs if job.state not in FINISHED | LIVE]
    live = [job.id for job in jobs if job.state in LIVE]
    advice = [] if path == "-" else [f"{count_text(len(jobs), 'job')} in {path}"]
    if waiting:
        advice.append(f"they wait here as well, until `gpuyard cancel {format_ids(waiting)}`")
    if live:
        advice.append(f"under way here as well: {format_ids(live)}")
    return advice
