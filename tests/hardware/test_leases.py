"""On a machine with an NVIDIA card and PyTorch: leases of scripts and programs, compared with `nvidia-smi`."""

import os
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no NVIDIA card")

SCRIPT = (
    "import sys, time\n"
    "from gpuyard import GPUScheduler\n"
    "options = {'poll_interval': 1, 'max_wait_time': 120, **eval(sys.argv[1])}\n"
    "with GPUScheduler(**options) as gpu_ids:\n"
    "    import torch\n"
    "    block = torch.ones(1024, 1024, 1024, device=f'cuda:{gpu_ids[0]}')\n"
    "    torch.cuda.synchronize()\n"
    "    print(time.monotonic(), torch.cuda.get_device_properties(gpu_ids[0]).uuid, flush=True)\n"
    "    sys.stdin.readline()\n"
    "    del block\n"
    "    print(time.monotonic(), flush=True)\n"
)


def start(*command: str, **options: object) -> "subprocess.Popen[str]":
    pytest.importorskip("torch")
    full_command = [*command, sys.executable, "-c", SCRIPT, repr(options)]
    return subprocess.Popen(
        full_command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )


def ready(process: "subprocess.Popen[str]") -> tuple[float, str]:
    assert process.stdout is not None
    moment, uuid = process.stdout.readline().split()
    return float(moment), uuid


def end(process: "subprocess.Popen[str]") -> float:
    output, _ = process.communicate("\n", timeout=120)
    assert process.returncode == 0
    return float(output)


def pids_by_smi() -> dict[int, tuple[str, float]]:
    query = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid,used_gpu_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [line.split(", ") for line in lines if line.strip()]
    return {int(pid): (uuid, float(memory)) for pid, uuid, memory in rows}


def test_a_with_block_runs_pytorch_on_its_leased_gpu() -> None:
    script = start()
    _, uuid = ready(script)
    seen_uuid, memory = pids_by_smi()[script.pid]
    assert seen_uuid == f"GPU-{uuid}"
    assert memory > 4096
    end(script)
    assert script.pid not in pids_by_smi()


def test_two_scripts_take_turns_on_one_gpu() -> None:
    first = start()
    ready(first)
    second = start()
    assert list(pids_by_smi()) == [first.pid]
    ended = end(first)
    began, _ = ready(second)
    assert began > ended
    assert list(pids_by_smi()) == [second.pid]
    end(second)


def test_scripts_with_declared_memory_share_a_gpu() -> None:
    scripts = [start(vram="8G"), start(vram="8G")]
    for script in scripts:
        ready(script)
    assert set(pids_by_smi()) == {script.pid for script in scripts}
    for script in scripts:
        end(script)


def test_run_starts_a_program_on_its_leased_gpu() -> None:
    program = "import torch; x = torch.ones(2**28, device='cuda'); print(torch.cuda.get_device_properties(0).uuid)"
    command = [sys.executable, "-m", "gpuyard", "run", "--vram", "4G", "--", sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    assert f"GPU-{result.stdout.strip()}" in listed


def test_an_exclusive_run_waits_for_a_script() -> None:
    script = start()
    ready(script)
    command = [sys.executable, "-m", "gpuyard", "run", "--wait", "1s", "--", "true"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert refused.returncode == 124
    assert f"pid {script.pid}" in refused.stderr
    end(script)
    assert subprocess.run([*command[:5], "60s", "--", "true"], timeout=120, check=False).returncode == 0
