"""`retry` and `release` of jobs whose secrets were dropped: the values come from the shell that asks.

The daemon answers which variables are lacking; a second request then sends the values of those, and no others. It
imports little, because every command imports it.
"""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Answer = dict[str, Any]

VERBS = ("retry", "release")


def second_request(verb: str, answer: "Answer", *, allow_missing: bool = False) -> "dict[str, object] | None":
    """Return the body of the request that supplies values of this process's environment, or None if it has none."""
    lacking = answer.get("lacking")
    if not lacking:
        return None
    values = {name: os.environ[name] for name in lacking["variables"] if name in os.environ}
    if not values and not allow_missing:
        return None
    # The first request has decided which jobs run again.
    chosen = {"all": True} if verb == "retry" else {}
    return {"ids": lacking["ids"], "environment": values, "allow_missing": allow_missing, **chosen}


def merge(first: "Answer", second: "Answer") -> "Answer":
    unchanged = [job for job in first["unchanged"] if not job["variables"]] + second["unchanged"]
    return {
        **second,
        "changed": " ".join(filter(None, (first["changed"], second["changed"]))),
        "count": first["count"] + second["count"],
        "unchanged": unchanged,
        "unchanged_count": first["unchanged_count"] - first["lacking"]["count"] + second["unchanged_count"],
        "revived": " ".join(filter(None, (first["revived"], second["revived"]))),
        "revived_count": first["revived_count"] + second["revived_count"],
        "left_alone": first.get("left_alone", {}),
    }
