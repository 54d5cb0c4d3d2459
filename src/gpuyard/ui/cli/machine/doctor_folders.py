"""The part of `gpuyard doctor` about folders: which are used and why, and which other machines have a queue."""

from typing import Any

from gpuyard.config import config_dir, lease_dir, load_config
from gpuyard.connect.queue_host import QueueElsewhere, known_hosts, refuse_other_machine
from gpuyard.core.scheduling.disk_space import CONFIGURED, disk_reason
from gpuyard.core.units import format_size
from gpuyard.errors import GpuyardError
from gpuyard.probes.disk_watch import read_disk_in_time
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
        found["disk"], problems = _check_disk(place.path)
        refuse_other_machine(place.path)
    except QueueElsewhere as error:
        return found, [f"{error}: {error.hint}"]
    except GpuyardError as error:
        return found, [f"{error}{f' ({error.hint})' if error.hint else ''}"]
    return found, problems


def _check_disk(state: str) -> tuple[dict[str, Any], list[str]]:
    """Return the free space of the disk of the queue and the limit, and what is wrong with it."""
    figure, least_mb = read_disk_in_time(state), load_config().host.min_free_disk_mb
    disk = {"free_mb": figure.free_mb, "total_mb": figure.total_mb, "min_free_mb": least_mb}
    reason = disk_reason(figure, least_mb, "the disk of the queue", CONFIGURED)
    if reason is None:
        return disk, []
    return disk, [f"no job starts: {reason.text}" + (f" ({reason.remedy})" if reason.remedy else "")]


def folder_lines(folders: dict[str, Any]) -> list[str]:
    if "state" not in folders:
        return []
    why = f", in place of {folders['instead_of']}: {folders['why']}" if folders["why"] else ""
    kind = f" ({folders['file_system']})" if folders["file_system"] and not why else ""
    others = [f"another queue of yours: on {each['host']}, {each['state']}" for each in folders["other_hosts"]]
    disk = folders.get("disk") or {"free_mb": None}
    free = (
        "" if disk["free_mb"] is None else f", {format_size(disk['free_mb'])} of {format_size(disk['total_mb'])} free"
    )
    return [f"queue: {folders['state']}{kind}{why}{free}", *others]
