"""Which memory is opened, what is leased for it, and the errors if it is not available."""

import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from gpuyard.config import lease_dir
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.installation import find_installation
from gpuyard.ledger.ledger import Ledger
from gpuyard.model.lease import Lease
from gpuyard.model.machine_snapshot import Device, Host, Snapshot, Vendor
from gpuyard.probes import local_machine
from gpuyard.recipes.render.memory import leased_memory as open_memory
from gpuyard.recipes.render.memory.leased_memory import choose_ram, choose_vram, missing_gpu_advice, open_device
from gpuyard.scripting import gpu_scheduler
from tests.fakes import torch_stand_in

MB = 1048576
BUDGET = 256 * MB
IN_RAM = "VRAM is simulated in RAM, and renderers get numpy arrays"


@pytest.fixture(autouse=True)
def no_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide this machine's PyTorch; tests that need it install a stand-in."""
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in ("CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that a value set by the test is removed after it
        monkeypatch.delenv(name)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch, no_pytorch: None) -> Any:
    return torch_stand_in.install(monkeypatch)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUYARD_SIMULATE", "2x24GB")


@pytest.fixture
def set_devices(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets the devices of the machine."""

    def put(*found: Device) -> None:
        def read(*_: object) -> Snapshot:
            return Snapshot(taken_at=0.0, host=Host(), devices=found)

        for home in (gpu_scheduler, open_memory, local_machine):
            monkeypatch.setattr(home, "snapshot", read)

    return put


def card(vendor: Vendor = Vendor.NVIDIA, device_id: str = "GPU-5ca1ab1e-0000-4000-8000-00000000da7a") -> Device:
    return Device(
        id=device_id, vendor=vendor, index=0, memory_total_mb=1024.0, memory_used_mb=0.0, memory_free_mb=1024.0
    )


def leases() -> tuple[Lease, ...]:
    folder = lease_dir()
    return Ledger(folder).leases() if folder.exists() else ()


def test_without_pytorch_the_memory_is_the_hosts_and_nothing_is_leased(set_devices: Callable[..., None]) -> None:
    set_devices(card())
    with open_device(BUDGET) as memory:
        assert memory.name == "host"
        assert leases() == ()
        memory.free(memory.allocate(BUDGET))


def test_with_a_card_the_budget_is_leased_until_the_work_ends_or_fails(
    torch: Any, set_devices: Callable[..., None]
) -> None:
    set_devices(card(Vendor.INTEL, "0000:00:02.0"), card())
    with open_device(BUDGET, label="night shift") as memory:
        assert memory.name == "cuda:0"
        (lease,) = leases()
        assert (lease.holder.label, lease.holder.pid) == ("night shift", os.getpid())
        (share,) = lease.shares
        assert (share.device_id, share.memory_mb, share.is_exclusive) == (card().id, 256.0, False)
    assert leases() == ()
    set_devices(card())

    def work() -> None:
        with open_device(BUDGET):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert leases() == ()
    assert torch.cuda.allocator.cap == torch.cuda.TOTAL


def test_the_card_is_one_of_pytorchs_vendor_and_an_unlisted_one_has_no_lease(
    torch: Any, set_devices: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_devices()
    with open_device(BUDGET, "cuda") as memory:
        assert memory.name == "cuda:0"
        assert leases() == ()
    monkeypatch.setattr(torch.version, "hip", "7.0")
    set_devices(card(), card(Vendor.AMD, "amd-0"))
    with open_device(BUDGET, "cuda"):
        assert [share.device_id for lease in leases() for share in lease.shares] == ["amd-0"]


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("kind", ["auto", "host"])
def test_on_simulated_gpus_the_budget_is_leased_and_the_memory_is_the_hosts(torch: Any, kind: str) -> None:
    with open_device(BUDGET, kind) as memory:
        assert memory.name == "host"
        assert [share.memory_mb for lease in leases() for share in lease.shares] == [256.0]
    assert leases() == ()


@pytest.mark.usefixtures("simulated")
def test_simulated_gpus_have_no_cuda_and_hidden_ones_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"no GPU has 44 GB"), open_device(44 * 1024 * MB):
        pass
    with pytest.raises(UserError, match="simulated GPUs have no CUDA"), open_device(BUDGET, "cuda"):
        pass
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with open_device(BUDGET):
        assert [share.device_id for lease in leases() for share in lease.shares] == ["SIM-1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES hides SIM-0, SIM-1"), open_device(BUDGET):
        pass


@pytest.mark.usefixtures("simulated")
def test_inside_a_lease_that_covers_the_budget_no_other_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_device(BUDGET):
        (around,) = leases()
        monkeypatch.setenv("GPUYARD_LEASE", around.id)
        with open_device(BUDGET // 2):
            assert leases() == (around,)


def test_the_error_without_pytorch_or_numpy_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentFault, match="PyTorch is not installed") as caught, open_device(BUDGET, "cuda"):
        pass
    line = f"for a GPU, install it with: {find_installation().with_extra('cuda')}"
    assert caught.value.hint == f"{line}; or use the device 'auto': {IN_RAM}"
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(EnvironmentFault, match="numpy is not installed") as caught, open_device(BUDGET):
        pass
    assert caught.value.hint == f"install it with: {find_installation().with_extra('render')}"


def test_a_fallback_to_host_memory_is_explained(torch: Any, monkeypatch: Any) -> None:
    assert [missing_gpu_advice(kind) for kind in ("auto", "host")] == [None, None]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (missing_gpu_advice("auto") or ("",))[0] == f"PyTorch {torch.__version__} finds no GPU: {IN_RAM}"
    monkeypatch.setitem(sys.modules, "torch", None)
    line = f"for a GPU, install it with: {find_installation().with_extra('cuda')}"
    assert missing_gpu_advice("auto") == (f"PyTorch is not installed: {IN_RAM}", line)
    monkeypatch.setenv("GPUYARD_SIMULATE", "2x24GB")
    assert missing_gpu_advice("auto") is None


def test_cuda_without_a_card_is_an_error(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentFault, match=r"PyTorch 2\.9\.0\S* finds no GPU") as caught:
        open_device(BUDGET, "cuda").__enter__()
    assert "CUDA_VISIBLE_DEVICES" in str(caught.value.hint)
    with open_device(BUDGET) as memory:
        assert memory.name == "host"


def test_a_pytorch_that_cannot_be_loaded_counts_as_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.syspath_prepend(str(tmp_path))
    with open_device(BUDGET) as memory:
        assert memory.name == "host"
    with pytest.raises(EnvironmentFault, match=r"libcudart\.so\.13"), open_device(BUDGET, "cuda"):
        pass


@pytest.mark.parametrize(("nbytes", "kind", "message"), [
    (BUDGET, "tpu", "there is no device of kind 'tpu'"),
    (0, "auto", "a VRAM budget of 0 MB is too small"),
])  # fmt: skip
def test_invalid_arguments_are_refused(nbytes: int, kind: str, message: str) -> None:
    with pytest.raises(UserError, match=message), open_device(nbytes, kind):
        pass


@pytest.mark.parametrize(("installed", "name"), [
    ("2.11.0+cu130", "PYTORCH_ALLOC_CONF"),
    ("2.8.1", "PYTORCH_CUDA_ALLOC_CONF"),
    ("unknown", "PYTORCH_ALLOC_CONF"),
])  # fmt: skip
def test_expandable_segments_are_set_under_the_name_that_this_pytorch_reads(
    torch: Any, set_devices: Callable[..., None], monkeypatch: pytest.MonkeyPatch, installed: str, name: str
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: installed)
    set_devices()
    with open_device(BUDGET):
        assert os.environ[name].startswith("expandable_segments:True,")
    monkeypatch.delenv(name)
    with open_device(BUDGET):
        assert name not in os.environ, "CUDA is set up already"


def test_the_users_allocator_settings_are_kept(
    torch: Any, set_devices: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    set_devices()
    with open_device(BUDGET):
        assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"
        assert "PYTORCH_ALLOC_CONF" not in os.environ


# Default budgets


def show_machine(monkeypatch: pytest.MonkeyPatch, available_mb: float | None = 8000.0) -> None:
    devices = tuple(
        Device(id=f"SIM-{number}", vendor=Vendor.SIMULATED, index=number, memory_free_mb=free)
        for number, free in enumerate((100.0, 500.0, None))
    )
    current = Snapshot(taken_at=None, host=Host(memory_available_mb=available_mb), devices=devices)
    monkeypatch.setattr(open_memory, "snapshot", lambda: current)


def test_default_budgets_are_a_part_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    show_machine(monkeypatch)
    assert choose_vram("host").text() == "2 GB (a quarter of the available RAM)"
    assert choose_ram().mb == 4000.0
    monkeypatch.setenv("GPUYARD_SIMULATE", "3x1GB")
    assert choose_vram("auto").mb == 400.0
    assert choose_vram("auto").text() == "400 MB (80% of the free memory of the device with the most)"
    show_machine(monkeypatch, available_mb=None)
    with pytest.raises(EnvironmentFault) as caught:
        choose_ram()
    assert caught.value.hint == "set the budget with --ram-budget, such as 8G"
