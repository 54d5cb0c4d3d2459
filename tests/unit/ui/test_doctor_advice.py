"""What `gpuyard doctor` says about a GPU that no probe can read."""

from gpuyard.model.machine_snapshot import Problem, Vendor
from gpuyard.probes.fallback_chain import Checkup
from gpuyard.ui.cli.machine.doctor import find_advice


def test_a_gpu_that_no_probe_can_read_names_the_missing_tools() -> None:
    def check(probe: str, kind: str) -> Checkup:
        problem = Problem(source=probe, kind=kind, message="no", vendor=Vendor.NVIDIA)
        return Checkup(vendor=Vendor.NVIDIA, probe=probe, devices=None, problems=(problem,), seconds=0.1)

    plugged = {"0000:01:00.0": Vendor.NVIDIA}
    text = "nvidia GPU at 0000:01:00.0: no probe can read it"
    assert find_advice([check("nvml", "missing"), check("nvidia-smi", "missing")], plugged) == [
        f"{text}; missing: nvml, nvidia-smi"
    ]
    assert find_advice([check("nvml", "crashed")], plugged) == [text, "nvml: no"]
