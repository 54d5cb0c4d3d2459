"""A world as a file: what the plan about a waiting job follows from, to decide it again elsewhere.

It has no commands, environments or secrets of jobs: a world knows none. Names of processes outside gpuyard are left
out, but for those that a reason names (`ForeignLoad.processes`).
"""

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpuyard.core.scheduling.plan import Plan
from gpuyard.core.scheduling.planner import decide
from gpuyard.core.scheduling.world import World
from gpuyard.errors import UserError

_FORMAT = "gpuyard world 1"


class WorldFile(Struct, frozen=True, kw_only=True):
    """`job_id` is the job that the plan is about, and `lane` its lane. `measured` and `used` are those of the world:
    JSON has no keys of two parts."""

    format: str
    job_id: int
    lane: int
    world: World
    measured: list[tuple[str, str, float | None]]
    used: list[tuple[str, str, float]]

    def decide(self) -> Plan:
        """Return the plan, with the reasons that `gpuyard why` gave."""
        return decide(self.restored(), explained_lane=self.lane)

    def restored(self) -> World:
        measured = {(lease_id, device_id): held_mb for lease_id, device_id, held_mb in self.measured}
        machine = replace(self.world.machine, measured=measured)
        return replace(self.world, machine=machine, used={(user, tag): seconds for user, tag, seconds in self.used})


def write_world(world: World, job_id: int, lane: int) -> bytes:
    devices = tuple(
        replace(each, processes=each.processes and tuple(replace(process, name=None) for process in each.processes))
        for each in world.machine.snapshot.devices
    )
    machine = replace(world.machine, snapshot=replace(world.machine.snapshot, devices=devices), measured={})
    found = WorldFile(
        format=_FORMAT,
        job_id=job_id,
        lane=lane,
        world=replace(world, machine=machine, used={}),
        measured=[(*key, held_mb) for key, held_mb in world.machine.measured.items()],
        used=[(*party, seconds) for party, seconds in world.used.items()],
    )
    return msgspec.json.encode(found)


def read_world(content: bytes) -> WorldFile:
    """Raise UserError for what `gpuyard why --export` of this version did not write."""
    try:
        found = msgspec.json.decode(content, type=WorldFile)
    except msgspec.DecodeError as error:
        raise UserError(
            f"this is no world of this version: {error}", hint="write one with `gpuyard why --export`"
        ) from None
    if found.format != _FORMAT:
        raise UserError(
            f"this is a '{found.format}', not a '{_FORMAT}'", hint="replay it with the version that wrote it"
        )
    return found
