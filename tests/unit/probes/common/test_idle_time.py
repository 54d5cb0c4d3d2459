import pytest

from gpuyard.model.machine_snapshot import Device, Host, Process, Snapshot, Vendor
from gpuyard.probes.devices_and_processes import idle_seconds, longest_idle
from gpuyard.probes.simulated_devices import SimulatedDevices, SimulatedUse


def test_a_process_is_idle_for_the_longest_window_without_activity() -> None:
    last_active = {7: 0.5, 8: 7.0, 9: 1e9}
    idle = longest_idle(last_active, lambda window: {pid for pid, ago in last_active.items() if ago <= window})
    assert idle == {7: 0.0, 8: 5.0, 9: 60.0}
    assert longest_idle([7], lambda window: {7} if window < 5 else set()) == {7: 0.0}
    assert longest_idle([7], lambda _: None) == {}


def test_a_simulated_process_is_idle_without_load_and_others_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUYARD_SIMULATE", "1x24GB")
    with SimulatedUse() as usage:
        usage.allocate("SIM-0", 1024)
        amd = Device(id="GPU-a", vendor=Vendor.AMD, processes=(Process(pid=1),))
        snapshot = Snapshot(taken_at=0.0, host=Host(), devices=(*SimulatedDevices().read(1).devices, amd))
        idle = idle_seconds(snapshot)
        assert [device_id for device_id, _ in idle] == ["SIM-0"]
        assert all(seconds >= 0 for seconds in idle.values())
        usage.set_load("SIM-0", 50)
        assert idle_seconds(snapshot) == {}
