"""`gpuyard edit`: change options of jobs that wait."""

from gpuyard.core.job.submit_options import NOT_EDITED
from gpuyard.errors import UserError
from gpuyard.ui.cli.ask_daemon import selection_text
from gpuyard.ui.cli.jobs.change_verbs import change
from gpuyard.ui.cli.jobs.changed_options import changed_options, options_besides
from gpuyard.ui.cli.jobs.submit import HEADINGS
from gpuyard.ui.cli.verb_options import IDS, IDS_HELP, JSON, SEVERAL, Typed, Verb

VERB = Verb(
    "Change options of jobs that are queued, held, delayed or blocked.\n\n"
    "They keep their ids, their commands and all other options, and wait at the place that the new ones give them. A "
    "job that has started is not changed: `gpuyard resubmit` makes a new one.\n\n"
    f"{IDS_HELP} Exit status 1 if no job changed.",
    (*options_besides(NOT_EDITED), JSON),
    SEVERAL,
    HEADINGS,
)


def run(typed: Typed) -> int:
    if not typed.arguments:
        raise UserError("which jobs should `gpuyard edit` change?", hint=f"name them: {IDS}")
    options = changed_options(typed)
    if not options:
        raise UserError("no option is given to change", hint="such as gpuyard edit 17 --vram 16G --priority 5")
    return change(
        typed, "edit", {"ids": selection_text(typed.arguments), "options": options}, "edited", "is not edited"
    )
