"""`GPUYARD_SIMULATE_HOST`: a machine with other RAM and CPUs than the real one."""

import pytest

from gpuyard.errors import UserError
from gpuyard.model.machine_snapshot import Host
from gpuyard.probes.simulated_devices import SimulatedHost


class Real:
    def read(self) -> Host:
        return Host(name="box", cpu_count=2.0, cpu_percent=7.0, memory_total_mb=100.0, memory_available_mb=5.0)

    def read_memory(self, host: Host) -> Host:
        return host


def test_ram_and_cpus_are_simulated_and_the_rest_is_real() -> None:
    host = SimulatedHost("23GB,8", Real()).read()
    assert (host.memory_total_mb, host.memory_available_mb, host.cpu_count) == (23 * 1024.0, 23 * 1024.0, 8.0)
    assert (host.name, host.cpu_percent) == ("box", 7.0)
    assert SimulatedHost("23GB", Real()).read().cpu_count == 2.0


def test_ram_in_use_is_read_again_with_the_memory() -> None:
    used = iter((300.0, 700.0, 9000.0))
    host = SimulatedHost("1000MB", Real(), lambda: next(used))
    first = host.read()
    assert first.memory_available_mb == 700.0
    assert [host.read_memory(first).memory_available_mb for _ in range(2)] == [300.0, 0.0]


@pytest.mark.parametrize("spec", ["much", "23GB,many", "0GB", "23GB,0"])
def test_a_bad_description_says_how_to_write_it(spec: str) -> None:
    with pytest.raises(UserError) as raised:
        SimulatedHost(spec, Real())
    assert raised.value.hint == "write it as 23GB, or as 23GB,8 for 8 CPUs"
