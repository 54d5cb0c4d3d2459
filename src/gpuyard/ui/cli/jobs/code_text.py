"""The code of a job as text, for `show` and `top`."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


def code_facts(code: "Mapping[str, Any] | None") -> "list[tuple[str, str | None]]":
    """Return the facts about a job's code; none from a daemon that does not know them."""
    if code is None:
        return []
    snapshot = code["snapshot"]
    is_gone = snapshot is not None and not code["snapshot_exists"]
    return [("code", code["text"]), ("script", code["script"]), ("snapshot", "removed" if is_gone else snapshot)]
