"""Both Apple tools together, as stand-ins on PATH: which fills in for which, and which error is reported."""

import shlex
from pathlib import Path

import pytest

from gpuyard.errors import ProbeCrashed, ProbeDenied, ProbeMissing, ProbeTimeout
from gpuyard.model.machine_snapshot import Device
from gpuyard.probes.apple_gpu import AppleProbe, read_powermetrics, unified_memory_limit_mb
from tests.executables import write_executable
from tests.in_time import in_time

PLIST = (
    '<?xml version="1.0" encoding="UTF-8"?>\n<plist version="1.0">\n<dict>\n'
    "<key>elapsed_ns</key><integer>200000000</integer>\n<key>hw_model</key><string>Mac15,6</string>\n"
    "<key>gpu</key>\n<dict>\n<key>idle_ratio</key><real>0.25</real>\n<key>gpu_energy</key><integer>600</integer>\n"
    "</dict>\n</dict>\n</plist>\n"
)
IOREG = (
    "+-o AGXAcceleratorG15X  <class AGXAcceleratorG15X, id 0x10000047b>\n"
    '      "PerformanceStatistics" = {"Device Utilization %"=42,"In use system memory"=1610612736}\n'
    '      "model" = "Apple M3 Pro"\n'
)
NOT_ROOT = "echo 'powermetrics must be invoked as the superuser' >&2; exit 1"
HANG = "exec sleep 600"


class Mac:
    """A PATH with only the stand-ins written into it and a shell's basic tools."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def has(self, tool: str, script: str) -> None:
        path = self._folder / tool
        write_executable(path, f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")

    def prints(self, tool: str, output: str) -> None:
        (self._folder / f"{tool}.out").write_text(output)
        self.has(tool, f"cat {shlex.quote(str(self._folder / tool))}.out")

    def has_memory(self, ram_gb: float, wired_limit_mb: str = "0") -> None:
        self.has(
            "sysctl",
            f'case "$*" in\n"-n hw.memsize") echo {int(ram_gb * 1024**3)};;\n'
            f'"-n iogpu.wired_limit_mb") echo {wired_limit_mb};;\n*) exit 1;;\nesac',
        )


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mac:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return Mac(folder)


def only_device() -> Device:
    (device,) = AppleProbe().read(5.0).devices
    return device


def test_with_root_power_comes_from_powermetrics_and_the_rest_from_ioreg(mac: Mac) -> None:
    mac.prints("powermetrics", PLIST)
    mac.prints("ioreg", IOREG)
    mac.has_memory(16)
    reading = AppleProbe().read(5.0)
    (device,) = reading.devices
    assert reading.problems == ()
    assert (device.id, device.name) == ("apple-gpu-0", "Apple M3 Pro")
    assert (device.utilization_percent, device.memory_used_mb, device.power_draw_w) == (42.0, 1536.0, 3.0)
    assert device.memory_total_mb == 10922.67


def test_without_root_ioreg_answers_and_the_hint_names_what_root_would_add(mac: Mac) -> None:
    mac.has("powermetrics", NOT_ROOT)
    mac.prints("ioreg", IOREG)
    reading = AppleProbe().read(5.0)
    (device,) = reading.devices
    (problem,) = reading.problems
    assert (device.name, device.utilization_percent, device.power_draw_w) == ("Apple M3 Pro", 42.0, None)
    assert (problem.source, problem.kind, problem.vendor) == ("powermetrics", "denied", "apple")
    assert "root" in (problem.hint or "")
    assert "sudo" in (problem.hint or "")


@pytest.mark.parametrize(("ioreg", "kind"), [(None, "missing"), ("echo nothing", "garbled"), ("exit 1", "crashed")])
def test_powermetrics_answers_alone_if_ioreg_fails(mac: Mac, ioreg: str | None, kind: str) -> None:
    mac.prints("powermetrics", PLIST)
    if ioreg is not None:
        mac.has("ioreg", ioreg)
    reading = AppleProbe().read(3.0)
    (device,) = reading.devices
    (problem,) = reading.problems
    assert (device.name, device.utilization_percent, device.power_draw_w) == ("Apple GPU (Mac15,6)", 75.0, 3.0)
    assert device.memory_used_mb is None
    assert (problem.source, problem.kind) == ("ioreg", kind)


def test_the_use_comes_from_powermetrics_and_the_total_from_sysctl_only(mac: Mac) -> None:
    mac.prints("powermetrics", PLIST)
    mac.prints("ioreg", IOREG.replace("Device Utilization %", "Tiler Utilization %"))
    assert only_device().utilization_percent == 75.0
    mac.prints("ioreg", IOREG)
    assert only_device().memory_total_mb is None


def test_without_both_tools_the_probe_is_missing(mac: Mac) -> None:
    with pytest.raises(ProbeMissing, match="powermetrics, ioreg: not installed"):
        AppleProbe().read(5.0)


def test_the_error_names_both_tools_if_both_fail(mac: Mac) -> None:
    mac.has("powermetrics", NOT_ROOT)
    mac.has("ioreg", "echo 'no registry' >&2; exit 3")
    with pytest.raises(ProbeCrashed) as refusal:
        AppleProbe().read(5.0)
    assert refusal.value.source == "ioreg"
    assert "no registry" in refusal.value.message
    assert "powermetrics: " in refusal.value.message
    assert "superuser" in refusal.value.message


def test_a_denied_tool_is_reported_rather_than_a_missing_tool(mac: Mac) -> None:
    mac.has("powermetrics", NOT_ROOT)
    with pytest.raises(ProbeDenied) as refusal:
        AppleProbe().read(5.0)
    assert refusal.value.source == "powermetrics"
    assert "ioreg: " in refusal.value.message
    assert "root" in (refusal.value.hint or "")


def test_two_hanging_tools_share_one_timeout(mac: Mac) -> None:
    mac.has("powermetrics", HANG)
    mac.has("ioreg", HANG)
    mac.has("sysctl", HANG)

    def give_up() -> None:
        with pytest.raises(ProbeTimeout, match="powermetrics"):
            AppleProbe().read(0.5)

    in_time(3.0, give_up)


@pytest.mark.parametrize(
    ("ram_gb", "share_mb"), [(8, 5461.33), (32, 21845.33), (36, 24576.0), (64, 49152.0), (128, 98304.0)]
)
def test_the_gpu_share_is_two_thirds_or_of_large_memory_three_quarters(
    mac: Mac, ram_gb: float, share_mb: float
) -> None:
    mac.has_memory(ram_gb)
    assert unified_memory_limit_mb(5.0) == share_mb


def test_the_share_of_the_gpu_may_be_configured_within_the_memory(mac: Mac) -> None:
    mac.has_memory(64, wired_limit_mb="57344")
    assert unified_memory_limit_mb(5.0) == 57344.0
    mac.has_memory(16, wired_limit_mb="999999")
    assert unified_memory_limit_mb(5.0) == 16384.0
    mac.has("sysctl", '[ "$2" = hw.memsize ] && echo 34359738368 || { echo "unknown oid" >&2; exit 1; }')
    assert unified_memory_limit_mb(5.0) == 21845.33


@pytest.mark.parametrize("sysctl", ["echo 'sysctl: cannot stat /proc/sys/hw/memsize' >&2; exit 255", "echo", "echo ?"])
def test_a_failing_sysctl_leaves_the_total_unknown(mac: Mac, sysctl: str) -> None:
    mac.prints("ioreg", IOREG)
    mac.has("sysctl", sysctl)
    assert only_device().memory_total_mb is None


def test_powermetrics_is_called_for_one_short_sample_of_the_gpu(mac: Mac, tmp_path: Path) -> None:
    arguments = tmp_path / "arguments"
    mac.has("powermetrics", f'echo "$*" > {shlex.quote(str(arguments))}; exit 1')
    with pytest.raises(ProbeCrashed):
        read_powermetrics(5.0)
    assert arguments.read_text().split() == ["--samplers", "gpu_power", "-f", "plist", "-n", "1", "-i", "200"]
