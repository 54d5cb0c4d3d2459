"""PyTorch's current device in a `GPUScheduler` block, before or after the script imports PyTorch.

PyTorch is a stand-in with two cards; `tests/hardware/test_late_torch.py` does the same with PyTorch itself.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes import torch_two_cards

STAND_IN = str(Path(torch_two_cards.__file__).parent)
BEGINNING = "import os, sys\nfrom gpuyard import GPUScheduler\n"


@pytest.fixture(autouse=True)
def two_gpus(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUYARD_SIMULATE", "2x24GB")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PYTHONPATH", STAND_IN)


def printed(script: str, **environment: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", BEGINNING + script],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.parametrize(("before", "inside"), [
    ("pass", "import torch"),
    ("pass", "import torch.cuda"),
    ("import torch", "pass"),
    ("import torch; torch.cuda.init()", "pass"),
], ids=["imported inside", "a submodule inside", "imported before", "CUDA set up before"])  # fmt: skip
def test_pytorch_uses_the_leased_gpu(before: str, inside: str) -> None:
    script = (
        f"{before}\n"
        "with GPUScheduler(specific_gpus=[1]) as gpu_ids:\n"
        f"    {inside}\n"
        "    import torch\n"
        "    print(gpu_ids, torch.cuda.current_device(), torch.cuda.current_card())\n"
    )
    assert printed(script) == ["[1] 1 SIM-1"]


def test_the_device_number_follows_the_variable_set_before_the_import() -> None:
    script = (
        "with GPUScheduler(specific_gpus=[1]) as gpu_ids:\n"
        "    os.environ['CUDA_VISIBLE_DEVICES'] = str(gpu_ids[0])\n"
        "    import torch\n"
        "    print(torch.cuda.current_device(), torch.cuda.current_card())\n"
    )
    assert printed(script) == ["0 SIM-1"]


def test_a_script_that_hides_the_leased_gpu_keeps_its_choice() -> None:
    script = (
        "with GPUScheduler(specific_gpus=[1]) as gpu_ids:\n"
        "    os.environ['CUDA_VISIBLE_DEVICES'] = '0'\n"
        "    import torch\n"
        "    print(torch.cuda.current_card())\n"
    )
    assert printed(script) == ["SIM-0"]


def test_each_thread_uses_its_own_gpu() -> None:
    script = (
        "import threading, torch\n"
        "both = threading.Barrier(2, timeout=60)\n"
        "results = []\n"
        "def work():\n"
        "    with GPUScheduler() as gpu_ids:\n"
        "        both.wait()\n"
        "        results.append((gpu_ids, torch.cuda.current_device()))\n"
        "threads = [threading.Thread(target=work) for _ in range(2)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "print(sorted(results), torch.cuda.current_device())\n"
    )
    assert printed(script) == ["[([0], 0), ([1], 1)] 0"]


def test_after_an_inner_block_the_outer_block_s_gpu_is_current_again() -> None:
    script = (
        "with GPUScheduler(specific_gpus=[1]):\n"
        "    with GPUScheduler(specific_gpus=[0]):\n"
        "        import torch\n"
        "        print(torch.cuda.current_card())\n"
        "    print(torch.cuda.current_card())\n"
    )
    assert printed(script) == ["SIM-0", "SIM-1"]


@pytest.mark.parametrize("inside", ["import torch", "pass", "import importlib.util; importlib.util.find_spec('torch')"])
def test_the_import_hook_is_removed(inside: str) -> None:
    script = (
        "import gpuyard.scripting.gpu_scheduler\n"
        "before = list(sys.meta_path)\n"
        "with GPUScheduler():\n"
        f"    {inside}\n"
        "assert sys.meta_path == before, sys.meta_path\n"
        "import torch\n"
        "assert 'exec_module' not in vars(torch.__loader__)\n"
        "print(torch.cuda.is_initialized())\n"
    )
    assert printed(script) == [str(inside == "import torch")]


def test_a_pytorch_that_cannot_be_imported_raises_its_own_error() -> None:
    script = (
        "with GPUScheduler() as gpu_ids:\n"
        "    try:\n"
        "        import torch\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
        "    print('torch' in sys.modules, gpu_ids)\n"
    )
    assert printed(script, TORCH_FAILS="1") == ["libcudart is missing", "False [0]"]


def test_a_gpu_hidden_when_pytorch_was_initialised_is_an_error_and_is_released() -> None:
    script = (
        "import torch\n"
        "from gpuyard.ledger.ledger import open_ledger\n"
        "os.environ['CUDA_VISIBLE_DEVICES'] = '0'; torch.cuda.init()\n"
        "del os.environ['CUDA_VISIBLE_DEVICES']\n"
        "try:\n"
        "    GPUScheduler(specific_gpus=['SIM-1']).acquire()\n"
        "except Exception as error:\n"
        "    print(error)\n"
        "print(open_ledger().leases())\n"
    )
    assert printed(script) == ["CUDA_VISIBLE_DEVICES hides SIM-1 from this process", "()"]
