"""`gpuyard export`: writes a script that submits waiting jobs to Slurm or Ray."""

import sys

from gpuyard.errors import UserError
from gpuyard.model.option import Option
from gpuyard.model.units import format_count
from gpuyard.ui.cli.ask_daemon import request
from gpuyard.ui.cli.command_grammar import Arguments, Typed, Verb
from gpuyard.ui.cli.terminal import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuyard.model.exported_job import ExportedJob

VERB = Verb(
    """Write a script that submits waiting jobs to Slurm or Ray.

    It contains all waiting jobs, or the jobs of IDS: 17, 17-20, name=big or tag=night. FILE may be - for standard
    output. The script does not need gpuyard, and contains no values of environment variables. What it cannot express
    is printed, and is in the script as comments. The jobs stay in this queue.

    \b
    gpuyard export slurm submit.sh
    gpuyard export ray - tag=night
    """,
    (Option("force", "flag", None, "Overwrite FILE if it exists."),),
    Arguments("slurm|ray FILE [IDS]...", is_many=True),
)


def run(typed: Typed) -> int:
    if len(typed.arguments) < 2 or typed.arguments[0] not in ("slurm", "ray"):
        raise UserError("which target, and which file?", hint="write it as gpuyard export slurm submit.sh")
    site, path, *ids = typed.arguments
    jobs = _request(" ".join(ids))
    from gpuyard.config import load_config
    from gpuyard.recipes.export_scripts import ray_script, slurm_script

    config = load_config()
    tags = config.queue.tags
    script = slurm_script(jobs, config.slurm, tags) if site == "slurm" else ray_script(jobs, config.ray, tags)
    # Arguments of commands that are not UTF-8 keep their bytes.
    _write(path, script.text.encode("utf-8", "surrogateescape"), is_forced=typed.flag("force"))
    for line in (*(f"not in the script: {each}" for each in script.notes), *_advice(path, jobs)):
        note(f"gpuyard: {line}")
    return 0


def _request(ids: str) -> "list[ExportedJob]":
    import msgspec

    from gpuyard.model.exported_job import ExportedJob

    page = request("GET", "/exports", {"ids": ids})
    found = page["jobs"]
    while page["next"] is not None:
        page = request("GET", "/exports", {"ids": ids, "after": str(page["next"])})
        found += page["jobs"]
    if not found:
        raise UserError("no job is waiting", hint="name jobs to export others")
    return msgspec.convert(found, list[ExportedJob])


def _write(path: str, content: bytes, *, is_forced: bool) -> None:
    if path == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(content)
        return
    from gpuyard.system.write_files import write_results

    try:
        write_results(path, content, exact_mode=0o755, is_new=not is_forced)
    except FileExistsError:
        raise UserError(f"'{path}' exists already", hint="name another file, or give --force") from None


def _advice(path: str, jobs: "list[ExportedJob]") -> "list[str]":
    from gpuyard.model.lifecycle import FINISHED, LIVE
    from gpuyard.model.selection import format_ids

    waiting = [job.id for job in jobs if job.state not in FINISHED | LIVE]
    live = [job.id for job in jobs if job.state in LIVE]
    advice = [] if path == "-" else [f"{format_count(len(jobs), 'job')} in {path}"]
    if waiting:
        advice.append(f"they still wait in this queue too; `gpuyard cancel {format_ids(waiting)}` removes them")
    if live:
        advice.append(f"still running in this queue too: {format_ids(live)}")
    return advice
