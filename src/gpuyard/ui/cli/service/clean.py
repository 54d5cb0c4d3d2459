"""`gpuyard clean`: forgets jobs that finished long ago, and their logs."""

from gpuyard.connect.fast_http import connect
from gpuyard.errors import UserError
from gpuyard.ui.cli.terminal import say, say_json
from gpuyard.ui.cli.text_table import count_text
from gpuyard.ui.cli.verb_options import JSON, Option, Typed, Verb

VERB = Verb(
    """Forget jobs that finished long ago, and their logs.

    \b
    gpuyard clean --older-than 30d
    """,
    (Option("older-than", "TIME", "Those that ended longer ago than this, such as 30d or 12h."), JSON),
)


def run(typed: Typed) -> int:
    from gpuyard.core.units import parse_duration

    age = typed.text("older-than")
    if age is None:
        raise UserError("which jobs should be forgotten?", hint="write it as gpuyard clean --older-than 30d")
    with connect(start=True) as daemon:
        answer = daemon.request("POST", "/clean", body={"older_than_s": parse_duration(age)})
    if typed.flag("json"):
        say_json(answer)
    else:
        say(f"forgot {count_text(answer['jobs'], 'job')}; {answer['bytes'] / 1048576:.1f} MB of logs are gone")
    return 0
