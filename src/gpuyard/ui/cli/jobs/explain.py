"""`gpuyard why` and `gpuyard history`: why a job has not started, and what happened to it."""

from gpuyard.client.fast_http import connect
from gpuyard.errors import UserError
from gpuyard.model.option import Option
from gpuyard.model.units import format_time
from gpuyard.ui.cli.ask_daemon import say_answer, select, show_each
from gpuyard.ui.cli.command_grammar import IDS_HELP, JSON, SEVERAL, Answer, Command, Typed, Verb
from gpuyard.ui.cli.jobs.job_text import gpu_text
from gpuyard.ui.cli.terminal import table_lines
from gpuyard.ui.cli.text_table import Column, clean

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

WHY = Verb(
    f"Explain why a job has not started, what would start it, and when it may start.\n\n{IDS_HELP}",
    (
        Option("verbose", "flag", None, "Say what each GPU lacks, with figures, and who holds it.", short="v"),
        Option("export", "text", "FILE", "Write what the plan follows from, for `gpuyard simulate replay`."),
        JSON,
    ),
    SEVERAL,
)


def _run_why(typed: Typed) -> int:
    path = typed.values()["export"]
    if path is None:
        return show_each(typed, "/why", detailed_lines if typed.flag("verbose") else _why_lines)
    from gpuyard.system.write_files import write_results

    with connect(start=True) as daemon:
        ids = select(daemon.request, typed.arguments) if typed.arguments else []
        if len(ids) != 1:
            raise UserError("--export writes about one job", hint="such as `gpuyard why 17 --export FILE`")
        answer = daemon.request("GET", f"/jobs/{ids[0]}/world")
    write_results(path, answer["world"].encode())
    what = f"{path} has what the plan about job {ids[0]} follows from"
    return say_answer(typed, {"id": ids[0], "file": path}, f"{what}: `gpuyard simulate replay {path}` decides it again")


def _why_lines(answer: Answer) -> "Iterator[str]":
    """Yield the sentence that says why, reasons that it leaves out, and what would start the job."""
    summary = answer["summary"]
    yield clean(summary)
    of_machine = [each for each in answer["reasons"] if each["device_id"] is None and each["kind"] != "too-few"]
    for text in dict.fromkeys(each["brief"] for each in of_machine):
        if text not in summary:
            yield f"  {clean(text)}"
    yield from _last_lines(answer)


def detailed_lines(answer: Answer) -> "Iterator[str]":
    """Yield also the reason of each GPU with its figures, and all holders."""
    yield clean(answer["summary"])
    by_text: dict[str, list[str]] = {}
    for reason in answer["reasons"]:
        by_text.setdefault(reason["text"], []).extend(filter(None, [reason["device_id"]]))
    for text, devices in by_text.items():
        labels = ", ".join(gpu_text(device, answer, "") for device in devices)
        yield f"  {f'GPU {labels}: ' if labels else ''}{clean(text)}"
    for holder in _holders(answer["reasons"]):
        yield f"  held by: {clean(holder)}"
    yield from _last_lines(answer)


def _last_lines(answer: Answer) -> "Iterator[str]":
    for remedy in filter(None, dict.fromkeys(reason.get("remedy") for reason in answer["reasons"])):
        if remedy not in answer["summary"]:
            yield f"  to change that: {clean(remedy)}"
    if answer["estimated_start"] is not None:
        verb = "resume" if answer["state"] == "suspended" else "start"
        may = f"was expected to {verb}" if answer.get("is_overdue") else f"may {verb}"
        yield f"  {may} {format_time(answer['estimated_start'])}: {clean(answer['estimate'])}"
    elif answer["estimate"]:
        yield f"  {clean(answer['estimate'])}"


def _holders(reasons: list[Answer]) -> list[str]:
    """Return each holder once, without those that a reason's own text names. The pid of a job is the daemon's."""
    texts = " ".join(reason["text"] for reason in reasons)
    words = texts.replace(",", " ").replace(";", " ")
    lines: dict[str, None] = {}
    for holder in (holder for reason in reasons for holder in reason["holders"]):
        label = holder.get("label") or ""
        if label.startswith("job "):
            if f" {label} " not in f" {words} ":
                lines[f"{label} of {holder['user']}"] = None
        else:
            lines[f"{holder['user']}, pid {holder['pid']}{f' ({label})' if label else ''}"] = None
    return [line for line in lines if line not in texts]


def _event_lines(answer: Answer) -> list[str]:
    columns = (Column("TIME"), Column("EVENT"), Column("DETAILS", is_long=True))
    rows = [(format_time(event["at"]), event["kind"], event["text"] or "") for event in answer["events"]]
    return [f"job {answer['id']}", *table_lines(columns, rows)]


COMMANDS = {
    "why": Command(WHY, _run_why),
    "history": Command(
        Verb(f"Show what happened to a job, event by event.\n\n{IDS_HELP}", (JSON,), SEVERAL),
        lambda typed: show_each(typed, "/history", _event_lines),
    ),
}
