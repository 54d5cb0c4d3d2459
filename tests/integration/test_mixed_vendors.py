"""A machine with GPUs of several vendors: a program gets those of one and sees no others, and lists tell them apart."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpuyard import GPUScheduler, find_free_gpus, get_gpu_info
from gpuyard.errors import UserError
from tests.fakes.queue_command import GPUYARD, run, run_here
from tests.integration.queue_fixture import QueueUnderTest

Tools = Callable[[str, str], Path]

CARD = """<gpu id="00000000:0{number}:00.0"><product_name>NVIDIA Test</product_name>
<uuid>GPU-11111111-0000-0000-0000-00000000000{number}</uuid>
<fb_memory_usage><total>24576 MiB</total><used>0 MiB</used><free>24576 MiB</free></fb_memory_usage>
<utilization><gpu_util>0 %</gpu_util></utilization><processes></processes></gpu>
"""
RADEONS = {
    f"card{number}": {"GPU use (%)": "0", "VRAM Total Memory (B)": size, "VRAM Total Used Memory (B)": "0",
                      "Card Series": name, "PCI Bus": f"0000:1{number}:00.0"}
    for number, (name, size) in enumerate(
        [("Rembrandt [Radeon 680M]", "536870912"), ("Navi 31 [Radeon RX 7900 XT]", "21474836480")]
    )
}  # fmt: skip
SIMULATED = "nvidia:2x24GB,amd:1x16GB,amd-integrated:1x2GB"
VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL",
             "ZE_AFFINITY_MASK")  # fmt: skip
SHOW = "echo " + " ".join(f"${{{name}-unset}}" for name in VARIABLES)


@pytest.fixture
def desktop(own_queue: QueueUnderTest, tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> QueueUnderTest:
    """A queue on a machine with two NVIDIA cards, a Radeon, and the graphics of its AMD processor."""
    for name, printed in {
        "nvidia-smi": f"<nvidia_smi_log>{CARD.format(number=1)}{CARD.format(number=2)}</nvidia_smi_log>",
        "rocm-smi": json.dumps(RADEONS),
    }.items():
        # A shell script, which answers within the daemon's deadline for a sample even on a slow machine.
        tools(name, f"#!/bin/sh\n/bin/cat <<'END'\n{printed}\nEND\n")
    monkeypatch.delenv("GPUYARD_SIMULATE")
    monkeypatch.setenv("PATH", str(tmp_path / "tools"))
    own_queue.start()
    return own_queue


@pytest.fixture
def mixed(own_queue: QueueUnderTest, monkeypatch: pytest.MonkeyPatch) -> QueueUnderTest:
    monkeypatch.setenv("GPUYARD_SIMULATE", SIMULATED)
    own_queue.start()
    return own_queue


def seen(queue: QueueUnderTest, **options: str) -> list[str]:
    """Return the values of the variables in a job's program."""
    job = queue.shell(SHOW, **options)
    queue.wait(job)
    return queue.log_of(job).split()


def test_a_job_gets_cards_of_one_vendor_and_sees_no_others(desktop: QueueUnderTest) -> None:
    """Before: the first job got the AMD processor's graphics or the Radeon, and saw both NVIDIA cards as well."""
    assert seen(desktop, vram="10G") in (["0", "-1", "-1", "-1", "9999"], ["1", "-1", "-1", "-1", "9999"])
    assert seen(desktop, vram="10G", vendor="amd") == ["-1", "1", "0", "0", "9999"]
    assert seen(desktop, gpus="0") == ["-1", "-1", "-1", "-1", "9999"]
    assert seen(desktop, device="amd:0") == ["-1", "0", "0", "0", "9999"]
    both = desktop.shell("true", gpus="2")
    desktop.wait(both)
    assert desktop.job(both)["gpu_labels"] == ["nvidia:0", "nvidia:1"]
    with pytest.raises(UserError, match=r"3 nvidia GPUs needed, but only 2 can be used; this machine has 1 amd, 1 amd"):
        desktop.shell("true", gpus="3")
    with pytest.raises(UserError, match="nvidia:0, amd:0 are GPUs of 2 vendors"):
        desktop.shell("true", device="amd:0,nvidia:0")
    with pytest.raises(UserError, match="no nvidia GPU has 30 GB; the largest has 24 GB"):
        desktop.shell("true", vram="30G")


def test_lists_and_messages_name_the_vendor(mixed: QueueUnderTest) -> None:
    """Before: `0, 1, 0`, and a bare 0 meant whichever came first."""
    first, _ = mixed.start_gated("first", vendor="amd", exclusive=True)
    second, _ = mixed.start_gated("second", gpus="2", exclusive=True)
    third = mixed.shell("true", vendor="amd", vram="1G")
    mixed.until_state(third, "queued")
    assert mixed.job(first)["gpu_labels"] == ["amd:0"]
    assert mixed.job(second)["gpu_labels"] == ["nvidia:0", "nvidia:1"]
    assert [row["label"] for row in mixed.get("/devices")["devices"]] == ["nvidia:0", "nvidia:1", "amd:0", "amd:1"]
    assert "Programs get nvidia GPUs unless they name others, with --vendor or --device" in run_here("devices").stdout
    listed = run_here("queue").stdout
    assert "amd:0" in listed
    assert "nvidia:0,nvidia:1" in listed
    why = run_here("why", str(third)).stdout
    assert "waits for 1 amd GPU" in why
    assert "GPU amd:0: held by" in why
    leases = run_here("leases").stdout
    assert "amd:0" in leases
    assert "nvidia:0,nvidia:1" in leases
    ambiguous = run("run", "--device", "0", "--", "true")
    assert ambiguous.returncode == 2
    assert "'0' is a GPU of 2 vendors" in ambiguous.stderr
    assert "write nvidia:0 or amd:0" in ambiguous.stderr
    waiting = run("run", "--wait", "0s", "--vendor", "amd", "--vram", "1G", "--", "true")
    assert waiting.returncode == 124
    assert "amd:0: held by" in waiting.stderr
    assert "nvidia" not in waiting.stderr


def test_jobs_that_wait_for_one_vendor_do_not_hold_up_those_of_another(mixed: QueueUnderTest) -> None:
    """A large job waits for both NVIDIA cards; the Radeon takes what comes behind it, and the free NVIDIA card not."""
    mixed.start_gated("busy", device="nvidia:0", exclusive=True)
    large = mixed.shell("true", gpus="2", exclusive=True)
    behind = mixed.shell("true", vendor="amd", vram="1G")
    assert mixed.wait(behind)["succeeded"] == 1
    assert mixed.state(large) == "queued"
    assert mixed.job(behind)["gpu_labels"] == ["amd:0"]


def test_a_program_gets_only_its_devices_from_run(mixed: QueueUnderTest) -> None:
    assert run("run", "--", "/bin/sh", "-c", SHOW).stdout.split() == ["0", "-1", "-1", "-1", "9999"]
    done = run("run", "--vendor", "amd", "--", "/bin/sh", "-c", SHOW)
    assert done.stdout.split() == ["-1", "SIM-amd-0", "0", "0", "9999"]
    held = run("run", "--vendor", "amd", "--", *GPUYARD, "sim-job", "--vram", "1G", "--seconds", "0")
    assert held.stdout.startswith("SIM-amd-0: holding 1 GB")
    # Inside, only the devices of the lease are left to choose from.
    inner = run("run", "--vendor", "amd", "--", *GPUYARD, "run", "--", "/bin/sh", "-c", SHOW)
    assert inner.stdout.split() == ["-1", "SIM-amd-0", "0", "0", "9999"]


def test_the_configuration_chooses_the_vendor(mixed: QueueUnderTest) -> None:
    (mixed.home / "config.toml").write_text('[devices]\nvendor = "amd"\n')
    assert seen(mixed) == ["-1", "SIM-amd-0", "0", "0", "9999"]
    assert seen(mixed, concurrency="1") == ["-1", "SIM-amd-0", "0", "0", "9999"]
    assert seen(mixed, vendor="nvidia")[0] in {"0", "1"}
    (mixed.home / "config.toml").write_text('[devices]\nvendor = "voodoo"\n')
    done = run("run", "--", "true")
    (mixed.home / "config.toml").unlink()
    assert done.returncode == 2
    assert "voodoo" in done.stderr


def test_a_script_counts_the_gpus_of_one_vendor(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUYARD_SIMULATE", SIMULATED)
    with GPUScheduler(num_gpus=2) as gpu_ids:
        assert gpu_ids == [0, 1]
        assert find_free_gpus() == []
        with GPUScheduler(vendor="amd", memory_free_threshold_gb=1) as others:
            assert others == [0]
        with GPUScheduler(specific_gpus="amd:1", memory_free_threshold_gb=1) as others:
            assert others == [1]
    assert find_free_gpus() == [0, 1]
    assert [info["uuid"] for info in get_gpu_info()] == ["SIM-nvidia-0", "SIM-nvidia-1"]
    with GPUScheduler(specific_gpus=[1]) as gpu_ids:
        assert gpu_ids == [1]
    for_rocm = SimpleNamespace(version=SimpleNamespace(cuda=None, hip="6.4"))
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "torch", for_rocm)
        assert [info["uuid"] for info in get_gpu_info()] == ["SIM-amd-0", "SIM-amd-1"]
    with pytest.raises(UserError, match="3 nvidia GPUs needed"):
        GPUScheduler(num_gpus=3).acquire()
    with pytest.raises(UserError, match="of 2 vendors"):
        GPUScheduler(specific_gpus=["amd:0", "nvidia:0"]).acquire()
    with pytest.raises(UserError, match="vendor is 'voodoo'"):
        GPUScheduler(vendor="voodoo")


def test_one_vendor_s_variables_stay_as_they_are(queue: QueueUnderTest) -> None:
    """On a machine with one vendor nothing is set for the others."""
    assert seen(queue)[1:] == ["unset"] * 4
    assert seen(queue, gpus="0") == ["-1", "unset", "-1", "unset", "unset"]
    job = queue.shell("true")
    queue.wait(job)
    assert queue.job(job)["gpu_labels"] == ["0"]
