"""The part of `gpuyard doctor` about folders: which are used and why, and which other machines have a queue."""

from typing import Any

from gpuyard.config import config_dir, lease_dir
from gpuyard.connect.queue_host import QueueElsewhere, known_hosts, refuse_other_machine
from gpuyard.errors import GpuyardError
from gpuyard.system.user_directories import find_state_directory


def check_folders() -> tuple[dict[str, Any], list[str]]:
    """Return the folders in use with the reasons, the other machines that have a queue, and problems with them."""
    found: dict[str, Any] = {"configuration": str(config_dir())}
    try:
        place = find_state_directory()
        found |= {"state": place.path, "instead_of": None, "why": None, "file_system": place.kind}
        if place.problem is not None:
            found |= {"instead_of": place.wanted, "why": place.problem}
        found["other_hosts"] = [
            {"host": each.host, "state": each.state} for each in known_hosts(place.wanted) if not each.is_here
        ]
        found["leases"] = str(lease_dir())
        refuse_other_machine(place.path)
    except QueueElsewhere as error:
        return found, [f"{error}: {error.hint}"]
    except GpuyardError as error:
        return found, [f"{error}{f' ({error.hint})' if error.hint else ''}"]
    return found, []


def folder_lines(folders: dict[str, Any]) -> list[str]:
    if "state" not in folders:
        return []
    why = f", in place of {folders['instead_of']}: {folders['why']}" if folders["why"] else ""
    kind = f" ({folders['file_system']})" if folders["file_system"] and not why else ""
    others = [f"another queue of yours: on {each['host']}, {each['state']}" for each in folders["other_hosts"]]
    return [f"queue: {folders['state']}{kind}{why}", *others]
