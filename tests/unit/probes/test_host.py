"""The host within its cgroup's limits, on trees built in a folder, and once on the machine the tests run on."""

import os
import socket
from collections import namedtuple
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpuyard.model.machine_snapshot import Host
from gpuyard.probes.host import REREAD_LIMITS_AFTER_S, PsutilHost

GB = 1024**3
CpuTimes = namedtuple("CpuTimes", "user system idle iowait guest")  # noqa: PYI024
Memory = namedtuple("Memory", "total available")  # noqa: PYI024


class Machine:
    """Eight CPUs, 64 GB of RAM with 48 GB free, a cgroup tree in a folder, and a clock that the test moves."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.now = 1000.0
        self.slept: list[float] = []
        self.busy = 5000.0
        self.waited = 0.0
        self.busy_cpus = 0.0
        self.group_cpus = 0.0
        self.group_used = 300.0
        self._counters: list[tuple[Path, str, float]] = []
        monkeypatch.setattr(psutil, "cpu_times", self._cpu_times)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(64 * GB, 48 * GB))
        monkeypatch.setattr(psutil, "cpu_count", lambda: 8)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
        self.host = PsutilHost(root=root, monotonic=lambda: self.now, sleep=self._sleep)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def limit(self, group: str = "/job", **files: object) -> None:
        """Put this process into a cgroup of version 2 with these files."""
        self.write("proc/self/cgroup", f"0::{group}")
        for name, text in files.items():
            self.write(f"sys/fs/cgroup{group}/{name}", str(text))

    def counts_group_time(self, path: str, template: str, per_second: float) -> None:
        self._counters.append((self.root / "sys/fs/cgroup" / path, template, per_second))
        self._write_counters()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.busy += seconds * self.busy_cpus
        self.group_used += seconds * self.group_cpus
        self._write_counters()

    def read(self) -> Host:
        return self.host.read()

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.pass_time(seconds)

    def _write_counters(self) -> None:
        for path, template, per_second in self._counters:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(template.format(round(self.group_used * per_second)))

    def _cpu_times(self) -> CpuTimes:
        idle = self.now * 8 - self.busy - self.waited
        return CpuTimes(user=self.busy - 10, system=10.0, idle=idle, iowait=self.waited, guest=self.busy - 10)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_without_cgroups_the_figures_of_the_machine_are_used(machine: Machine) -> None:
    host = machine.read()
    assert (host.cpu_count, host.memory_total_mb, host.memory_available_mb) == (8.0, 65536.0, 49152.0)
    assert (host.limited_by, host.name) == (None, socket.gethostname())


def test_the_first_reading_measures_the_cpu_briefly_and_later_ones_since_the_previous(machine: Machine) -> None:
    machine.busy_cpus = 2.0
    assert machine.read().cpu_percent == 25.0
    assert machine.slept == [pytest.approx(0.1)]
    machine.busy_cpus = 4.0
    machine.pass_time(2.0)
    assert machine.read().cpu_percent == 50.0
    machine.busy_cpus = 8.0
    machine.pass_time(0.04)
    assert machine.read().cpu_percent == 50.0, "shortly after another reading its figure is repeated"
    machine.pass_time(0.04)
    assert machine.read().cpu_percent == 100.0
    assert len(machine.slept) == 1


def test_waiting_for_a_disk_does_not_count_as_busy(machine: Machine) -> None:
    machine.read()
    machine.waited += 4.0
    machine.pass_time(1.0)
    assert machine.read().cpu_percent == 0.0


def test_only_cpus_in_the_affinity_mask_count(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 6}, raising=False)
    assert (machine.read().cpu_count, machine.read().limited_by) == (3.0, None)
    monkeypatch.delattr(os, "sched_getaffinity")
    assert machine.read().cpu_count == 8.0, "a machine without affinity masks"


@pytest.mark.parametrize("version", [1, 2])
def test_files_that_are_read_again_and_again_are_available_in_a_container_too(machine: Machine, version: int) -> None:
    """The kernel drops them before it kills a program. A data set that is read in each epoch is active page cache."""
    if version == 1:
        machine.write("proc/self/cgroup", "4:memory:/job")
        folder, names, prefix = "sys/fs/cgroup/memory/job", ("limit_in_bytes", "usage_in_bytes"), "total_"
    else:
        machine.write("proc/self/cgroup", "0::/job")
        folder, names, prefix = "sys/fs/cgroup/job", ("max", "current"), ""
    for name, size in zip(names, (16 * GB, 15 * GB), strict=True):
        machine.write(f"{folder}/memory.{name}", str(size))
    machine.write(f"{folder}/memory.stat", f"{prefix}inactive_file {GB}\n{prefix}active_file {10 * GB}")
    assert machine.read().memory_available_mb == 12 * 1024


CACHE = f"anon {3 * GB}\ninactive_file {2 * GB}\nactive_file 0"


@pytest.mark.parametrize(
    ("files", "total_gb", "available_gb", "limited_by"),
    [
        pytest.param({"max": 8, "current": 5, "stat": CACHE}, 8, 5, "cgroup", id="inactive file cache is available"),
        pytest.param({"max": 128, "current": 1}, 64, 48, None, id="a limit above the machine does not count"),
        pytest.param({"max": 60, "current": 1}, 60, 48, "cgroup", id="never more available than in the machine"),
        pytest.param({"max": 8}, 8, 8, "cgroup", id="no usage figure"),
        pytest.param({"max": 1, "current": 2}, 1, 0, "cgroup", id="above its limit"),
    ],
)
def test_a_cgroup_v2_limit_is_the_total(
    machine: Machine, files: dict[str, Any], total_gb: float, available_gb: float, limited_by: str | None
) -> None:
    machine.limit(**{f"memory.{name}": each * GB if name != "stat" else each for name, each in files.items()})
    host = machine.read()
    assert (host.memory_total_mb, host.memory_available_mb) == (total_gb * 1024.0, available_gb * 1024.0)
    assert host.limited_by == limited_by


def test_the_lowest_limit_of_the_group_and_its_parents_counts_and_no_other(machine: Machine) -> None:
    machine.limit("/user.slice", **{"memory.max": 16 * GB, "memory.current": 15 * GB, "cpu.max": "200000 100000"})
    machine.limit("/user.slice/job", **{"memory.max": 8 * GB, "memory.current": 2 * GB, "cpu.max": "300000 100000"})
    machine.limit("/other", **{"memory.max": GB})
    machine.limit("/user.slice/job/step", **{"cpu.max": "max 100000"})
    host = machine.read()
    assert (host.memory_total_mb, host.memory_available_mb, host.cpu_count) == (8192.0, 1024.0, 2.0)


def test_the_limits_of_a_container_are_at_the_root_of_its_tree(machine: Machine) -> None:
    machine.limit("/", **{"memory.max": 4 * GB, "memory.current": GB})
    assert machine.read().memory_available_mb == 3072.0


@pytest.mark.parametrize("path", ["/docker/3f2a", "/../../system.slice"])
def test_a_group_path_of_the_host_means_the_root_of_the_containers_tree(machine: Machine, path: str) -> None:
    machine.write("proc/self/cgroup", f"4:memory:{path}\n0::{path}")
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", str(2 * GB))
    machine.write("sys/fs/cgroup/memory.limit_in_bytes", str(GB))
    assert machine.read().memory_total_mb == 2048.0


def test_cgroup_v1_limits_are_read(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "9:name=systemd:/\n4:memory:/job\n3:cpu,cpuacct:/job\n0::/")
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712")
    machine.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", str(8 * GB))
    machine.write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", str(6 * GB))
    machine.write("sys/fs/cgroup/memory/job/memory.stat", f"inactive_file 0\ntotal_inactive_file {GB}")
    machine.write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "150000")
    machine.write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000")
    machine.counts_group_time("cpu,cpuacct/job/cpuacct.usage", "{}\n", 1e9)
    machine.group_cpus = 0.75
    host = machine.read()
    assert (host.memory_total_mb, host.memory_available_mb) == (8192.0, 3072.0)
    assert (host.cpu_count, host.cpu_percent, host.limited_by) == (1.5, 50.0, "cgroup")


def test_cgroup_v1_may_count_cpu_time_in_another_tree(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "4:memory:/\n2:cpuacct:/job\n1:cpu:/job")
    machine.write("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "200000")
    machine.write("sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000")
    machine.counts_group_time("cpuacct/job/cpuacct.usage", "{}\n", 1e9)
    machine.group_cpus = 0.5
    assert machine.read().cpu_percent == 25.0


def test_cgroup_v2_beside_v1_is_read_too(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "4:cpuset:/\n0::/job")
    machine.write("sys/fs/cgroup/unified/job/memory.max", str(3 * GB))
    assert machine.read().memory_total_mb == 3072.0


@pytest.mark.parametrize("limit", ["max", "9223372036854771712", "9223372036854775807", "-1", "", "lots"])
def test_values_that_mean_unlimited_set_no_limit(machine: Machine, limit: str) -> None:
    machine.limit(**{"memory.max": limit, "cpu.max": f"{limit} 100000"})
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", limit)
    machine.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", limit)
    machine.write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    host = machine.read()
    assert (host.memory_total_mb, host.cpu_count, host.limited_by) == (65536.0, 8.0, None)


def test_a_quota_above_the_machine_does_not_count(machine: Machine) -> None:
    machine.limit(**{"cpu.max": "1600000 100000"})
    machine.busy_cpus = 2.0
    host = machine.read()
    assert (host.cpu_count, host.cpu_percent, host.limited_by) == (8.0, 25.0, None)


def test_with_a_quota_the_cpu_percentage_is_the_use_of_the_quota(machine: Machine) -> None:
    machine.limit(**{"cpu.max": "150000 100000"})
    machine.counts_group_time("job/cpu.stat", "usage_usec {}\nuser_usec 5\n", 1e6)
    machine.busy_cpus, machine.group_cpus = 8.0, 0.3
    assert machine.read().cpu_percent == 20.0
    machine.group_cpus = 1.2
    machine.pass_time(1.0)
    host = machine.read()
    assert (host.cpu_count, host.cpu_percent, host.limited_by) == (1.5, 80.0, "cgroup")
    machine.group_cpus = 3.0
    machine.pass_time(1.0)
    assert machine.read().cpu_percent == 100.0, "a burst above the quota"
    machine.group_used = 0.0
    machine.pass_time(1.0)
    assert machine.read().cpu_percent is None, "the counter has decreased"


def test_a_quota_without_a_cpu_time_counter_leaves_the_percentage_unknown(machine: Machine) -> None:
    machine.limit(**{"cpu.max": "100000 100000"})
    machine.busy_cpus = 8.0
    host = machine.read()
    assert (host.cpu_count, host.cpu_percent) == (1.0, None)


def test_a_changed_quota_restarts_the_measurement(machine: Machine) -> None:
    machine.limit()
    machine.counts_group_time("job/cpu.stat", "usage_usec {}\n", 1e6)
    machine.busy_cpus, machine.group_cpus = 4.0, 0.5
    assert machine.read().cpu_percent == 50.0
    machine.limit(**{"cpu.max": "200000 100000"})
    machine.pass_time(REREAD_LIMITS_AFTER_S + 1.0)
    assert machine.read().cpu_percent == 25.0
    assert len(machine.slept) == 2


def test_unreadable_files_set_no_limit(machine: Machine) -> None:
    machine.limit()
    # A folder in place of the file cannot be read, even by root.
    (machine.root / "sys/fs/cgroup/job/memory.max").mkdir(parents=True)
    (machine.root / "sys/fs/cgroup/job/cpu.max").mkdir()
    assert machine.read().limited_by is None


@pytest.mark.parametrize("lines", ["", ":::", "nonsense", "0::/a\0b", "0::/" + 300 * "x", "\ufffd:memory:/x\n1:cpu"])
def test_a_malformed_list_of_groups_is_ignored(machine: Machine, lines: str) -> None:
    machine.write("proc/self/cgroup", lines)
    assert machine.read().memory_total_mb == 65536.0


def test_figures_that_psutil_cannot_read_are_unknown(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no /proc here")

    for name in ("cpu_times", "virtual_memory", "cpu_count", "getloadavg"):
        monkeypatch.setattr(psutil, name, refuse)
    monkeypatch.setattr(os, "sched_getaffinity", refuse, raising=False)
    monkeypatch.setattr(socket, "gethostname", refuse)
    assert machine.read() == Host()


def test_the_figures_of_this_machine_are_within_those_of_psutil() -> None:
    host = PsutilHost().read()
    memory = psutil.virtual_memory()
    assert 0 < (host.memory_total_mb or 0) <= memory.total / 2**20 + 0.01
    assert 0 <= (host.memory_available_mb or -1) <= (host.memory_total_mb or 0)
    assert 0 < (host.cpu_count or 0) <= (os.cpu_count() or 1)
    assert host.cpu_percent is not None
    assert 0 <= host.cpu_percent <= 100
    assert host.load_1m is not None
    assert host.name


def test_ram_alone_is_read_again_within_the_limits_that_were_found(machine: Machine) -> None:
    machine.write("sys/fs/cgroup/memory.max", str(8 * GB))
    machine.write("sys/fs/cgroup/memory.current", str(2 * GB))
    before = machine.read()
    machine.write("sys/fs/cgroup/memory.current", str(7 * GB))
    after = machine.host.read_memory(before)
    assert (after.memory_total_mb, after.memory_available_mb) == (8 * 1024.0, 1024.0)
    assert (after.name, after.cpu_percent) == (before.name, before.cpu_percent)
