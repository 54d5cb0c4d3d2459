"""The options of `gpuyard resubmit` and `gpuyard edit`: those of `submit` that one job can have, and `--unset`."""

from gpuyard.core.job.submit_options import SUBMIT_OPTIONS
from gpuyard.errors import UserError
from gpuyard.ui.cli.jobs.submit import sent_options
from gpuyard.ui.cli.verb_options import Option, Typed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container

_MANY_JOBS = ("stagger",)
_UNSET = Option("unset", "OPTION", "Leave out an option that the job has, such as vram.", is_repeatable=True)
_IN = Option("in", "TIME", "Start no earlier than after this time, such as 2h30m.")
OWN = ("unset", "in", "json", "allow-missing")


def options_besides(others: "Container[str]" = ()) -> "tuple[Option, ...]":
    """Return the options of a single job, all but `others`."""
    table = [
        Option(each.name, each.metavar, each.help, is_repeatable=each.is_repeatable, choices=each.choices)
        for each in SUBMIT_OPTIONS.values()
        if not each.is_for_batch and not each.makes_many and each.name not in _MANY_JOBS and each.name not in others
    ]
    return (*table, _IN, _UNSET)


def changed_options(typed: Typed) -> "dict[str, object]":
    """Return the changes to send; an option that is left out is None."""
    changes: dict[str, object] = dict(sent_options(typed, OWN))
    unset = typed.options.get("unset")
    for name in unset if isinstance(unset, list) else ():
        bare = name.lstrip("-")
        if bare not in SUBMIT_OPTIONS:
            raise UserError(f"--unset: there is no option '{name}'", hint="see `gpuyard submit --help`")
        if bare in changes:
            raise UserError(f"--unset {name} and --{bare} do not go together", hint="leave out one of them")
        changes[bare] = None
    return changes
