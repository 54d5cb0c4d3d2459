"""`gpuyard top`: GPUs, queue and a job's log live in the terminal."""

import os
import sys

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.ui.cli.ask_daemon import request
from gpuyard.ui.cli.verb_options import Typed, Verb

VERB = Verb(
    """Watch the GPUs and the queue live, read logs, and act on jobs with a key.

    ? shows the keys, q quits. Needs the package textual, which the extra `top` of gpuyard installs.
    """
)


def run(_: Typed) -> int:
    is_terminal = all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    if not is_terminal or os.environ.get("TERM", "dumb") == "dumb":
        raise UserError("`gpuyard top` needs a terminal", hint="in a pipe use `gpuyard queue` and `gpuyard devices`")
    try:
        from gpuyard.ui.tui.app import Top
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "textual":
            raise
        from gpuyard.installation import find_installation

        raise EnvironmentFault(
            "`gpuyard top` needs textual, which gpuyard's extra `top` installs",
            hint=f"install it with: {find_installation().with_extra('top')}",
        ) from error
    from gpuyard.ui.tui.glyphs import glyphs_for, has_colour

    request("GET", "/status")  # restarts or reports an older daemon before the screen opens
    if not has_colour(os.environ):
        os.environ["NO_COLOR"] = "1"
    Top(glyphs_for(os.environ, sys.stdout.encoding or "")).run()
    return 0
