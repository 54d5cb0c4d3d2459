"""Print what a cluster node has, for `gpuyard doctor --engine`: runs as a job there, with the working directory to look
for as its argument."""

import os
import sys
import time

import msgspec

from gpuyard.probes.fallback_chain import check_probes
from gpuyard.probes.local_machine import local_probes

_PROBES_WITHIN_S = 5.0


def main() -> None:
    devices = {
        device.id: device for each in check_probes(local_probes(), _PROBES_WITHIN_S) for device in each.devices or ()
    }
    cards_mb = [device.memory_total_mb for device in devices.values() if device.memory_total_mb is not None]
    report = {"at": time.time(), "has_cwd": os.path.isdir(sys.argv[1]), "cards_mb": cards_mb}
    sys.stdout.write(f"report={msgspec.json.encode(report).decode()}\n")
