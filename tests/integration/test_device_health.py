"""Faults of GPUs, from the driver to the queue: no new work, the job runs again elsewhere, the card comes back."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.nvml import FakeDevice, FakeHealth, FakeMemory, FakeNvml, FakeState, build_fake_nvml
from tests.fakes.queue_command import run
from tests.integration.queue_fixture import QueueUnderTest, until

MIB = 1048576
WELL = FakeHealth(ecc=0, remap_pending=False, throttle=0, link=(16, 16))
CARDS = tuple(
    FakeDevice(
        uuid=f"GPU-0000000{number}-aaaa-bbbb-cccc-000000000000",
        name="NVIDIA Test",
        pci=f"00000000:0{number}:00.0",
        memory=FakeMemory(total=24576 * MIB, used=0),
        utilization=50,
        power_mw=50_000,
        health=WELL,
    )
    for number in (1, 2)
)
FIRST, SECOND = CARDS[0].uuid, CARDS[1].uuid
needs_cc = pytest.mark.needs("cc")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_fake_nvml(tmp_path_factory.mktemp("nvml"))


class Machine:
    """Two NVIDIA cards; the driver sends an event with each change of their health, as it does for memory errors."""

    def __init__(self, nvml: FakeNvml) -> None:
        self._nvml = nvml
        self._xids: list[dict[int, int]] = [{}, {}]
        self._last = 0
        self.set()

    def set(self, health: FakeHealth = WELL, xid: int | None = None, card: int = 0) -> None:
        """Give a card this health, with an event if there is an `xid`; the other one is well."""
        if xid is not None:
            self._last += 1
            self._xids[card][self._last] = xid
        both = [health if number == card else WELL for number in range(2)]
        cards = [
            replace(each, health=replace(one, xids=xids))
            for each, one, xids in zip(CARDS, both, self._xids, strict=True)
        ]
        self._nvml.write(FakeState(devices=tuple(cards)))


@pytest.fixture
def machine(own_queue: QueueUnderTest, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    nvml = FakeNvml(library=library, state_file=tmp_path / "state")
    found = Machine(nvml)
    monkeypatch.delenv("GPUYARD_SIMULATE")
    for name, value in nvml.environment().items():
        monkeypatch.setenv(name, value)
    own_queue.start()
    return found


def issues(queue: QueueUnderTest) -> dict[str, list[tuple[str, str]]]:
    """Return the kinds and severities of what is wrong, by device."""
    return {
        device["id"]: [(issue["kind"], issue["severity"]) for issue in device["issues"]]
        for device in queue.get("/devices")["devices"]
    }


def places(queue: QueueUnderTest, job_id: int) -> list[Sequence[str]]:
    return [attempt["devices"] for attempt in queue.job(job_id)["attempts"]]


def open_gate(gate: Path) -> None:
    gate.write_text("go\n")


FAULTS = [
    pytest.param(WELL, 79, "xid", id="xid"),
    pytest.param(replace(WELL, ecc=2), 48, "ecc", id="ecc"),
    pytest.param(replace(WELL, remap_pending=True), 63, "remap-pending", id="remap-pending"),
    pytest.param(replace(WELL, remap_pending=False, remap_failed=True), 64, "remap-failed", id="remap-failed"),
    pytest.param(replace(WELL, link=(4, 16)), 63, "link", id="link"),
]


@needs_cc
@pytest.mark.parametrize(("health", "xid", "kind"), FAULTS)
def test_a_job_that_dies_of_its_card_runs_again_elsewhere_without_using_a_retry(
    own_queue: QueueUnderTest, machine: Machine, health: FakeHealth, xid: int, kind: str
) -> None:
    queue = own_queue
    gate = queue.gate()
    job_id = queue.shell(f'[ "$GPUYARD_ATTEMPT" = 1 ] || exit 0; read word < {gate}; exit 3', vram="2G", device="0,1")
    queue.until_state(job_id, "running")
    until(lambda: places(queue, job_id), "its start")
    (first,) = places(queue, job_id)
    card = [FIRST, SECOND].index(first[0])
    machine.set(health, xid, card)
    began = time.monotonic()
    until(lambda: (kind, "fault") in issues(queue)[first[0]], "the fault")
    seen_s = time.monotonic() - began
    open_gate(gate)
    queue.wait(job_id)
    job = queue.job(job_id)
    assert job["state"] == "succeeded"
    assert [attempt["outcome"] for attempt in job["attempts"]] == ["device-fault", "succeeded"]
    assert places(queue, job_id)[1] != first
    assert job["failures"] == 0
    # A running job is measured every second; the bound is generous because the machine of a test may be busy.
    assert seen_s < 30.0


@needs_cc
def test_a_program_that_dies_at_the_moment_of_the_event_is_not_to_blame(
    own_queue: QueueUnderTest, machine: Machine, tmp_path: Path
) -> None:
    """The state with the event is in place just before the program ends: no sample can have shown it before."""
    queue, state = own_queue, Path(os.environ["FAKE_NVML_STATE"])
    well = state.read_text()
    gate = queue.gate()
    job_id = queue.shell(
        f'[ "$GPUYARD_ATTEMPT" = 1 ] || exit 0; read word < {gate}; mv {tmp_path}/bad {state}; exit 3', vram="2G"
    )
    until(lambda: places(queue, job_id), "its start")
    (first,) = places(queue, job_id)
    lines = well.splitlines()
    lines.insert(lines.index(f"device {first[0]}") + 1, "xid 7 79")
    (tmp_path / "bad").write_text("\n".join(lines) + "\n")
    open_gate(gate)
    queue.wait(job_id)
    assert [attempt["outcome"] for attempt in queue.job(job_id)["attempts"]] == ["device-fault", "succeeded"]


@needs_cc
def test_a_program_that_causes_faults_itself_does_not_run_for_ever(own_queue: QueueUnderTest, machine: Machine) -> None:
    queue, state = own_queue, os.environ["FAKE_NVML_STATE"]
    awk = 'awk -v n="$GPUYARD_ATTEMPT" \'{print} /^device/ {print "xid " (2 * n + cards++) " 79"}\''
    spoil = f"{awk} {state} > {state}.mine; mv {state}.mine {state}; exit 3"
    job_id = queue.shell(spoil, vram="2G")

    def faulty_cards() -> list[str]:
        return [each for each, found in issues(queue).items() if found] if queue.state(job_id) == "queued" else []

    for _ in range(4):
        until(lambda: queue.state(job_id) == "failed" or faulty_cards(), "its end or its wait for a healthy card")
        if queue.state(job_id) == "failed":
            break
        faulty = faulty_cards()
        assert run("devices", "clear", *faulty).returncode == 0
    queue.wait(job_id)
    outcomes = [attempt["outcome"] for attempt in queue.job(job_id)["attempts"]]
    assert outcomes == ["device-fault", "device-fault", "device-fault", "failed"]


@needs_cc
def test_a_figure_that_is_normal_again_ends_the_fault(own_queue: QueueUnderTest, machine: Machine) -> None:
    queue = own_queue
    machine.set(replace(WELL, remap_pending=True), 63)
    until(lambda: ("remap-pending", "fault") in issues(queue)[FIRST], "the fault")
    waiting = queue.submit("true", device="0", vram="2G")
    assert "remapped at the next reset" in queue.why(waiting)
    beside = queue.submit("true", vram="2G")
    queue.wait(beside)
    assert places(queue, beside) == [[SECOND]]
    machine.set(WELL, 13)  # an event of a program makes the driver's figures known at once
    queue.wait(waiting)
    assert queue.state(waiting) == "succeeded"
    until(lambda: ("remap-pending", "fault") not in issues(queue)[FIRST], "the end of the fault")


@needs_cc
def test_a_throttled_card_is_used_last(own_queue: QueueUnderTest, machine: Machine) -> None:
    queue = own_queue
    machine.set(replace(WELL, throttle=64), 13)
    until(lambda: issues(queue)[FIRST] == [("throttled", "alarm")], "the alarm")
    first, gate = queue.start_gated(vram="20G")
    assert places(queue, first) == [[SECOND]]
    second = queue.submit("true", vram="20G")
    queue.wait(second)
    assert places(queue, second) == [[FIRST]]
    open_gate(gate)


# What outlasts the daemon, and what others see: on simulated devices


def set_health(home: Path, **figures: Any) -> None:
    folder = home / "simulated"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "health.new").write_text(json.dumps({"SIM-0": figures} if figures else {}))
    (folder / "health.new").replace(folder / "health.json")


def xid(code: int) -> list[dict[str, float]]:
    return [{"code": code, "at": time.time()}]


@pytest.fixture
def healthy(own_queue: QueueUnderTest) -> QueueUnderTest:
    set_health(own_queue.home)
    own_queue.start()
    return own_queue


def test_an_xid_is_known_to_the_next_daemon_and_to_scripts_until_the_device_is_cleared(
    healthy: QueueUnderTest,
) -> None:
    queue = healthy
    set_health(queue.home, xids=xid(79))
    until(lambda: issues(queue)["SIM-0"] == [("xid", "fault")], "the fault")
    since = next(each["issues"][0]["since"] for each in queue.get("/devices")["devices"] if each["id"] == "SIM-0")
    set_health(queue.home)  # as after a restart of the machine: the driver reports nothing any more
    queue.restart()
    assert next(each["issues"][0]["since"] for each in queue.get("/devices")["devices"] if each["issues"]) == since
    waiting = queue.submit("true", device="0", vram="1G")
    assert "Xid 79" in queue.why(waiting)
    (note,) = queue.send("true", device="0", vram="1G")["notes"]
    assert note.startswith("it waits: too few GPUs that suit it take new work: GPU 0 is faulty since")
    assert "`gpuyard devices clear ID`" in note
    assert queue.send("true", vram="1G")["notes"] == [], "another GPU suits it"
    assert any("Xid 79" in notice for notice in queue.get("/status")["notices"])
    shown = run("devices")
    assert "GPU 0 is faulty since" in shown.stdout
    refused = run("run", "--device", "0", "--vram", "1G", "--wait", "1s", "--", "true")
    assert (refused.returncode != 0, "Xid 79" in refused.stderr) == (True, True), refused.stderr
    doctor = run("doctor")
    assert (doctor.returncode, "Xid 79" in doctor.stdout) == (1, True)
    assert json.loads(run("devices", "clear", "0", "--json").stdout) == {"cleared": ["SIM-0"]}
    queue.wait(waiting)
    assert queue.state(waiting) == "succeeded"
    assert run("run", "--device", "0", "--vram", "1G", "--", "true").returncode == 0


def test_clearing_accepts_a_counter_until_it_rises(healthy: QueueUnderTest) -> None:
    queue = healthy
    set_health(queue.home, ecc_uncorrected=2)
    until(lambda: issues(queue)["SIM-0"] == [("ecc", "fault")], "the fault")
    waiting = queue.submit("true", device="0", vram="1G")
    assert "2 uncorrectable ECC errors" in queue.why(waiting)
    assert queue.post("/devices/clear", devices=[0]) == {"devices": ["SIM-0"]}
    queue.wait(waiting)
    set_health(queue.home, ecc_uncorrected=3)
    until(lambda: issues(queue)["SIM-0"] == [("ecc", "fault")], "the fault")
    again = queue.submit("true", device="0", vram="1G")
    assert "1 uncorrectable ECC error" in queue.why(again)
    set_health(queue.home)
    queue.wait(again)


def test_a_device_that_is_not_faulty_cannot_be_cleared(healthy: QueueUnderTest) -> None:
    failed = run("devices", "clear", "1")
    assert failed.returncode == 2
    assert "GPU 1 is not faulty" in failed.stderr
