"""`gpuyard cancel`, `hold`, `release`, `resume`, `retry`, `suspend` and `priority`: change jobs of the queue."""

from gpuyard.client.supply_secrets import VERBS, decided, merge, second_request
from gpuyard.errors import UserError
from gpuyard.model.option import Option
from gpuyard.model.units import format_count
from gpuyard.ui.cli import JOB_VERBS
from gpuyard.ui.cli.ask_daemon import request, say_answer, selection_text
from gpuyard.ui.cli.command_grammar import IDS, IDS_HELP, JSON, SEVERAL, Answer, Arguments, Typed, Verb
from gpuyard.ui.cli.jobs.job_text import FINISHED, left_alone_text, revived_text
from gpuyard.ui.cli.terminal import note

_MOST_SHOWN = 20
_ALLOW_MISSING = Option(
    "allow-missing", "flag", None, "Run jobs even if this shell lacks secret variables that were dropped."
)
_IDS_HELP = f"{IDS_HELP} Exit status 1 if no job changed."


class ChangeVerb:
    """A verb that changes the jobs it is given: has `VERB` and `run`, as the module of any other verb has.

    `done` precedes the ids that changed; `not_done` follows the id of a job that did not.
    """

    def __init__(
        self, name: str, details: str, done: str, not_done: str | None = None, flags: "tuple[Option, ...]" = ()
    ) -> None:
        """`flags` are sent with the ids, under their names."""
        options = (*flags, _ALLOW_MISSING, JSON) if name in VERBS else (*flags, JSON)
        self.VERB = Verb(f"{JOB_VERBS[name]}\n\n{details}\n\n{_IDS_HELP}", options, SEVERAL)
        self._flags = [flag.name for flag in flags]
        self._name, self._done, self._not_done = name, done, not_done or f"is not {done}"

    def run(self, typed: Typed) -> int:
        if not typed.arguments:
            raise UserError(f"which jobs should `gpuyard {self._name}` change?", hint=f"name them: {IDS}")
        flags = {name: True for name in self._flags if typed.flag(name)}
        return change(typed, self._name, {"ids": selection_text(typed.arguments), **flags}, self._done, self._not_done)


class PriorityVerb:
    """`gpuyard priority IDS... N`: the last argument is the new priority."""

    VERB = Verb(
        f"{JOB_VERBS['priority']}\n\n"
        f"The last argument is the priority: 0 is the default, and higher starts earlier. {_IDS_HELP}",
        (JSON,),
        Arguments("IDS... N", is_many=True),
    )

    def run(self, typed: Typed) -> int:
        *ids, number = typed.arguments or [""]
        if not ids:
            raise UserError("which jobs, and what priority?", hint="write it as gpuyard priority 17 10")
        try:
            priority = int(number)
        except ValueError:
            raise UserError(f"'{number}' is not a priority", hint="write it as gpuyard priority 17 10") from None
        body = {"ids": selection_text(ids), "priority": priority}
        return change(typed, "priority", body, f"priority {priority} for", "keeps its priority")


COMMANDS = {
    "cancel": ChangeVerb(
        "cancel",
        "A running job and every process it started get SIGTERM; what still runs after its grace time is killed.",
        "cancelled",
    ),
    "hold": ChangeVerb("hold", "They keep their place in the queue, and wait for `gpuyard release`.", "held"),
    "priority": PriorityVerb(),
    "release": ChangeVerb("release", "Each starts in queue order, when a GPU has enough free memory.", "released"),
    "resume": ChangeVerb(
        "resume",
        "Each continues where it stopped as soon as its GPU has enough free memory; `gpuyard why` says what it waits "
        "for.",
        "will resume when memory is free:",
        "is unchanged",
    ),
    "retry": ChangeVerb(
        "retry",
        "They keep their ids and their earlier logs: each attempt has a log of its own. Jobs that were skipped because "
        "of them wait again, and so do those that were skipped because of these. Values of secret variables, such as "
        "HF_TOKEN, are dropped when a job has ended: they are taken from this shell.\n\n"
        "A job that is named by its id runs again in any case. Of a range or a selection without state=, only the jobs "
        "that failed or were rejected run again: those that succeeded or were cancelled are left alone, and counted.",
        "queued again",
        flags=(
            Option("only", "flag", None, "Leave jobs that were skipped because of these as they are."),
            Option("all", "flag", None, "Of a range or a selection, retry jobs that succeeded or were cancelled, too."),
        ),
    ),
    "suspend": ChangeVerb(
        "suspend",
        "Other jobs can use their GPUs meanwhile. After `gpuyard resume` a suspended job continues where it stopped; "
        "its program does not notice. Needs a driver that supports it, and enough free RAM.",
        "suspending",
        "is unchanged",
    ),
}


def change(typed: Typed, verb: str, body: dict[str, object], done: str, not_done: str) -> int:
    """Print the ids that changed, and on standard error why others did not. Return 1 if none changed."""
    answer = request("POST", f"/jobs/{verb}", body=body)
    second = second_request(answer, allow_missing=typed.flag("allow-missing"))
    if second is not None:
        answer = merge(answer, request("POST", f"/jobs/{verb}", body={**body, **second, **decided(verb)}))
    say_answer(typed, answer, *([f"{done} {answer['changed']}{revived_text(answer)}"] if answer["count"] else []))
    # A finished job that cannot be retried has another reason, which has to be named.
    counts_finished = verb != "retry" and _selects_many(str(body["ids"]))
    _note_unchanged(answer, not_done, FINISHED if counts_finished else ())
    left_alone = left_alone_text(answer)
    if left_alone:
        note(f"gpuyard: {left_alone}")
    elif not answer["count"] and not answer["unchanged"]:
        note("gpuyard: no job to change")
    return 0 if answer["count"] else 1


def _selects_many(ids: str) -> bool:
    return any(word == "all" or "=" in word for word in ids.replace(",", " ").split())


def _note_unchanged(answer: Answer, not_done: str, only_counted: tuple[str, ...]) -> None:
    unchanged, total = answer["unchanged"], answer["unchanged_count"]
    named = [job for job in unchanged if job.get("state") not in only_counted]
    finished = len(unchanged) - len(named)
    for job in named[:_MOST_SHOWN]:
        note(f"gpuyard: {job['id']} {not_done}: {job['reason']}")
    others = total - min(len(named), _MOST_SHOWN)
    if not others:
        return
    who = f"and {format_count(others, 'other')}" if answer["count"] or named else f"{others}"
    if others == finished:
        note(f"gpuyard: {who} had finished already")
    else:  # the daemon gives reasons for the first 100 jobs only
        note(f"gpuyard: {who} did not change" + (", some of them finished" if finished else ""))
