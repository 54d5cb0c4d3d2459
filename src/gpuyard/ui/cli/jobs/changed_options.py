"""The options of `gpuyard resubmit` and `gpuyard edit`: those of `submit` that one job can have, and `--unset`."""

from gpuyard.core.job.submit_options import SUBMIT_OPTIONS
from gpuyard.core.option import Option
from gpuyard.errors import UserError
from gpuyard.ui.cli.jobs.submit import sent_options
from gpuyard.ui.cli.verb_options import Typed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container

_MANY_JOBS = ("stagger",)
_UNSET = Option("unset", "texts", "OPTION", "Leave out an option that the job has, such as vram.")
_IN = Option("in", "text", "TIME", "Start no earlier than after this time, such as 2h30m.")
OWN = ("unset", "in", "json", "allow-missing")


def options_besides(others: "Container[str]" = ()) -> "tuple[Option, ...]":
    """Return the options of a single job, all but `others`."""
    table = [
        each.but(default=None, note=None)
        for each in SUBMIT_OPTIONS.values()
        if not each.is_for_batch and not each.makes_many and each.name not in _MANY_JOBS and each.name not in others
    ]
    return (*table, _IN, _UNSET)


def changed_options(typed: Typed) -> "dict[str, object]":
    """Return the changes to send; an option that is left out is None."""
    changes: dict[str, object] = dict(sent_options(typed, OWN))
    for name in typed.texts("unset"):
        bare = name.lstrip("-")
        if bare not in SUBMIT_OPTIONS:
            raise UserError(f"--unset: there is no option '{name}'", hint="see `gpuyard submit --help`")
        if bare in changes:
            raise UserError(f"--unset {name} and --{bare} do not go together", hint="leave out one of them")
        changes[bare] = None
    return changes
