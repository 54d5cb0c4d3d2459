"""Ask sites whether they can be reached now, all at once and within a time limit: for `gpuyard doctor`."""

import threading
import time
from collections.abc import Callable, Mapping

from gpuyard.engines.cluster.site import Site
from gpuyard.errors import EnvironmentFault

# Of each request: longer than a busy controller takes, and short enough for someone who waits.
WITHIN_S = 5.0
_TO_REPORT_S = 1.0


def unreachable_sites(openers: Mapping[str, Callable[[], Site]]) -> dict[str, str]:
    """Return why sites cannot be reached, by name, without those that answer. Never takes longer than 6 s: a site whose
    name server or socket hangs is left to its thread."""
    found: dict[str, str | None] = {}
    threads = [
        threading.Thread(target=_ask, args=(name, opener, found), daemon=True) for name, opener in openers.items()
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + WITHIN_S + _TO_REPORT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    answers = {name: found.get(name, f"no answer within {WITHIN_S:.0f} s") for name in openers}
    return {name: problem for name, problem in answers.items() if problem is not None}


def _ask(name: str, opener: Callable[[], Site], found: dict[str, str | None]) -> None:
    try:
        opener().report(())
    except EnvironmentFault as error:
        found[name] = f"{error} ({error.hint})" if error.hint else str(error)
    else:
        found[name] = None
