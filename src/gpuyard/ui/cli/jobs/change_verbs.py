"""`gpuyard cancel`, `hold`, `release`, `resume`, `retry`, `suspend` and `priority`: change jobs of the queue."""

from gpuyard.client.supply_secrets import VERBS, merge, second_request
from gpuyard.errors import UserError
from gpuyard.model.option import Option
from gpuyard.model.units import format_count
from gpuyard.ui.cli.ask_daemon import request, say_answer, selection_text
from gpuyard.ui.cli.command_grammar import IDS, IDS_HELP, JSON, SEVERAL, Answer, Arguments, Command, Typed, Verb
from gpuyard.ui.cli.jobs.job_text import FINISHED, revived_text
from gpuyard.ui.cli.terminal import note
from gpuyard.ui.cli.verbs import JOB_VERBS

_ALLOW_MISSING = Option(
    "allow-missing", "flag", None, "Run jobs even if this shell lacks secret variables that were dropped."
)
_IDS_HELP = f"{IDS_HELP} Exit status 1 if no job changed."


# By verb: what precedes the ids that changed, and what follows the id of a job that did not.
ACTS = {
    "cancel": ("cancelled", "is not cancelled"),
    "edit": ("edited", "is not edited"),
    "hold": ("held", "is not held"),
    "priority": ("priority {priority} for", "keeps its priority"),
    "release": ("released", "is not released"),
    "resume": ("will resume when memory is free:", "is unchanged"),
    "retry": ("queued again", "is not queued again"),
    "suspend": ("suspending", "is unchanged"),
}


def _verb(name: str, details: str, *flags: Option) -> Command:
    """Return a verb that changes the jobs it is given. `flags` are sent with the ids, under their names."""

    def run(typed: Typed) -> int:
        if not typed.arguments:
            raise UserError(f"which jobs should `gpuyard {name}` change?", hint=f"name them: {IDS}")
        given = {flag.name: True for flag in flags if typed.flag(flag.name)}
        return change(typed, name, {"ids": selection_text(typed.arguments), **given})

    options = (*flags, _ALLOW_MISSING, JSON) if name in VERBS else (*flags, JSON)
    return Command(Verb(f"{JOB_VERBS[name]}\n\n{details}\n\n{_IDS_HELP}", options, SEVERAL), run)


def _run_priority(typed: Typed) -> int:
    *ids, number = typed.arguments or [""]
    if not ids:
        raise UserError("which jobs, and what priority?", hint="write it as gpuyard priority 17 10")
    try:
        priority = int(number)
    except ValueError:
        raise UserError(f"'{number}' is not a priority", hint="write it as gpuyard priority 17 10") from None
    return change(typed, "priority", {"ids": selection_text(ids), "priority": priority})


_PRIORITY = Verb(
    f"{JOB_VERBS['priority']}\n\n"
    f"The last argument is the priority: 0 is the default, and higher starts earlier. {_IDS_HELP}",
    (JSON,),
    Arguments("IDS... N", is_many=True),
)
COMMANDS = {
    "cancel": _verb(
        "cancel",
        "A running job and every process it started get SIGTERM; what still runs after its grace time is killed.",
    ),
    "hold": _verb("hold", "They keep their place in the queue, and wait for `gpuyard release`."),
    "priority": Command(_PRIORITY, _run_priority),
    "release": _verb("release", "Each starts in queue order, when a GPU has enough free memory."),
    "resume": _verb(
        "resume",
        "Each continues where it stopped as soon as its GPU has enough free memory; `gpuyard why` says what it waits "
        "for.",
    ),
    "retry": _verb(
        "retry",
        "They keep their ids and their earlier logs: each attempt has a log of its own. Jobs that were skipped because "
        "of them wait again, and so do those that were skipped because of these. Values of secret variables, such as "
        "HF_TOKEN, are dropped when a job has ended: they are taken from this shell.\n\n"
        "A job that is named by its id runs again in any case. Of a range or a selection without state=, only the jobs "
        "that failed or were rejected run again: those that succeeded or were cancelled are left alone, and counted.",
        Option("only", "flag", None, "Leave jobs that were skipped because of these as they are."),
        Option("all", "flag", None, "Of a range or a selection, retry jobs that succeeded or were cancelled, too."),
    ),
    "suspend": _verb(
        "suspend",
        "Other jobs can use their GPUs meanwhile. After `gpuyard resume` a suspended job continues where it stopped; "
        "its program does not notice. Needs a driver that supports it, and enough free RAM.",
    ),
}


def change(typed: Typed, verb: str, body: dict[str, object]) -> int:
    """Print the ids that changed, and on standard error why others did not. Return 1 if none changed."""
    answer = request("POST", f"/jobs/{verb}", body=body)
    second = second_request(verb, answer, allow_missing=typed.flag("allow-missing"))
    if second is not None:
        answer = merge(answer, request("POST", f"/jobs/{verb}", body={**body, **second}))
    done, not_done = ACTS[verb]
    text = f"{done.format(**body)} {answer['changed']}{revived_text(answer)}"
    say_answer(typed, answer, *([text] if answer["count"] else []))
    # A finished job that cannot be retried has another reason, which has to be named.
    words = str(body["ids"]).replace(",", " ").split()
    counts_finished = verb != "retry" and any(word == "all" or "=" in word for word in words)
    _note_unchanged(answer, not_done, FINISHED if counts_finished else ())
    if left := answer.get("left_alone"):  # finished jobs that a retry of what failed did not run again
        counts = " and ".join(f"{count} {state}" for state, count in sorted(left.items(), reverse=True))
        nothing = "" if answer["count"] or answer["unchanged"] else "no job failed; "
        verb = "is" if sum(left.values()) == 1 else "are"
        note(f"gpuyard: {nothing}{counts} {verb} left alone; --all retries them too")
    elif not answer["count"] and not answer["unchanged"]:
        note("gpuyard: no job to change")
    return 0 if answer["count"] else 1


def _note_unchanged(answer: Answer, not_done: str, only_counted: tuple[str, ...]) -> None:
    unchanged, total = answer["unchanged"], answer["unchanged_count"]
    named = [job for job in unchanged if job.get("state") not in only_counted]
    finished = len(unchanged) - len(named)
    for job in named[:20]:
        note(f"gpuyard: {job['id']} {not_done}: {job['reason']}")
    others = total - min(len(named), 20)
    if not others:
        return
    who = f"and {format_count(others, 'other')}" if answer["count"] or named else f"{others}"
    if others == finished:
        note(f"gpuyard: {who} had finished already")
    else:  # the daemon gives reasons for the first 100 jobs only
        note(f"gpuyard: {who} did not change" + (", some of them finished" if finished else ""))
