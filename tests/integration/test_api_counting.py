"""Every GPU number in a script counts the GPUs visible to its process, under any CUDA_VISIBLE_DEVICES."""

from pathlib import Path

import pytest

from gpuyard import GPUScheduler
from gpuyard.config import lease_dir
from gpuyard.errors import UserError
from gpuyard.ledger.ledger import Ledger
from gpuyard.probes.simulated_devices import SimulatedUse
from gpuyard.scripting.gpu_info import BANNED_GPUS, find_free_gpus, get_gpu_info, get_gpu_names, get_total_num_gpus

pytestmark = pytest.mark.usefixtures("two_gpus")


def held() -> list[str]:
    leases = Ledger(lease_dir()).leases() if lease_dir().exists() else ()
    return sorted(share.device_id for lease in leases for share in lease.shares)


@pytest.mark.parametrize(("visible", "order"), [
    (None, ["SIM-0", "SIM-1"]), ("1,0", ["SIM-1", "SIM-0"]), ("SIM-1", ["SIM-1"]), ("1", ["SIM-1"]), ("-1", []),
])  # fmt: skip
def test_every_gpu_number_is_the_process_s_own(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, order: list[str]
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    numbers = list(range(len(order)))
    assert [(info["gpu_id"], info["uuid"]) for info in get_gpu_info()] == list(enumerate(order))
    assert get_total_num_gpus() == len(get_gpu_names()) == len(order)
    assert find_free_gpus() == numbers
    for number in numbers:
        with GPUScheduler(specific_gpus=number) as gpu_ids:
            assert (gpu_ids, held()) == ([number], [order[number]])
            assert find_free_gpus() == [other for other in numbers if other != number]
        BANNED_GPUS[:] = [number]
        assert find_free_gpus(specific_gpus=number) == []
        BANNED_GPUS.clear()


@pytest.mark.parametrize("visible", [None, "1", "SIM-1,SIM-0"])
def test_a_gpu_reported_as_free_can_be_requested(monkeypatch: pytest.MonkeyPatch, visible: str | None) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with SimulatedUse() as usage:
        usage.allocate("SIM-0", 20480)
        free = find_free_gpus()
        with GPUScheduler(specific_gpus=free) as gpu_ids:
            assert gpu_ids == free
            assert held() == ["SIM-1"]
            with pytest.raises(UserError, match="specific_gpus is an empty list"):
                GPUScheduler(specific_gpus=find_free_gpus()).acquire()


def test_gpu_numbers_in_the_configuration_are_the_machine_s(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_home.mkdir(exist_ok=True)
    (own_home / "config.toml").write_text("[devices]\nbanned = [0]\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert find_free_gpus() == [0]
    with GPUScheduler():
        assert held() == ["SIM-1"]


def test_a_gpu_hidden_from_this_process_is_not_leased_under_another_s_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES hides SIM-0"):
        GPUScheduler(specific_gpus=["SIM-0"]).acquire()
    with pytest.raises(UserError, match="there is no GPU '1'") as refused:
        GPUScheduler(specific_gpus=[1]).acquire()
    assert refused.value.hint == "there are: 0 (SIM-1), SIM-0"
    assert held() == []
