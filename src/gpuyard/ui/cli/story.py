"""`gpuyard story`: what happened to a job, step by step."""

from gpuyard.daemon.client import connect
from gpuyard.ui.cli.job_id import job_path
from gpuyard.ui.cli.options import JSON, ONE, Typed, Verb
from gpuyard.ui.cli.plain import Column, time_text
from gpuyard.ui.cli.terminal import say, say_json, say_table

VERB = Verb("""Tell what happened to a job, step by step.""", (JSON,), ONE)
_COLUMNS = (Column("TIME"), Column("WHAT"), Column("HOW", is_long=True))


def run(typed: Typed) -> int:
    answer = connect(start=True).request("GET", f"{job_path(typed.words[0])}/story")
    if typed.flag("json"):
        say_json(answer)
    elif answer["events"]:
        say_table(
            _COLUMNS, [(time_text(event["at"]), event["kind"], event["text"] or "") for event in answer["events"]]
        )
    else:
        say(f"nothing has been told of {answer['id']} yet")
    return 0
