"""The data behind the web page and `gpuyard top`: devices and their holders, recent use, the timeline, pages of the
queue, live logs, and resubmitted jobs."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuyard.errors import UserError
from gpuyard.ledger.ledger import HeldLease, open_ledger
from gpuyard.model.lease import Claim, Share
from gpuyard.probes.simulated_devices import SimulatedDevices, SimulatedUse
from gpuyard.system import user_sockets
from gpuyard.system.processes import this_process
from tests.integration.queue_fixture import DEADLINE_S, QueueUnderTest, until

pytestmark = pytest.mark.usefixtures("unmeasured")


@contextlib.contextmanager
def lease_of_a_script(device_id: str, memory_mb: float) -> Iterator[HeldLease]:
    claim = Claim(shares=(Share(device_id=device_id, memory_mb=memory_mb, is_exclusive=False),))
    held = open_ledger().claim(this_process("a script"), lambda *_: claim, DEADLINE_S)
    assert held is not None
    try:
        yield held
    finally:
        held.release()


def until_devices(queue: QueueUnderTest, condition: Callable[[list[Any]], object]) -> list[Any]:
    found: list[Any] = []

    def is_met() -> object:
        found[:] = queue.get("/devices")["devices"]
        return condition(found)

    until(is_met, f"devices that are so; they are {found}")
    return found


def test_devices_distinguish_own_leases_other_leases_and_foreign_processes(queue: QueueUnderTest) -> None:
    job_id, _ = queue.start_gated(vram="4G", device="0")
    with lease_of_a_script("SIM-1", 6144.0), SimulatedUse(SimulatedDevices()) as usage:
        usage.allocate("SIM-1", 2048.0)  # used by the script with the lease, which is this process
        usage.allocate("SIM-0", 1024.0)  # used without a lease
        first, second = until_devices(queue, lambda found: found[1]["leases"] and found[0]["memory"]["foreign_mb"])
        until(lambda: any(queue.get("/devices/history")["devices"]["SIM-1"]["used_mb"]), "its history")
        history = queue.get("/devices/history", span="10m")
    assert first["memory"] == {
        "capacity_mb": 24576.0, "own_mb": 4096.0, "own_used_mb": 0.0, "others_mb": 0.0, "others_used_mb": 0.0,
        "foreign_mb": 1024.0, "free_mb": 19456.0,
    }  # fmt: skip
    assert second["memory"] == {
        "capacity_mb": 24576.0, "own_mb": 0.0, "own_used_mb": 0.0, "others_mb": 6144.0, "others_used_mb": 2048.0,
        "foreign_mb": 0.0, "free_mb": 18432.0,
    }  # fmt: skip
    (own,), (script,) = first["leases"], second["leases"]
    assert (own["who"], own["job"], own["is_own"], own["reserved_mb"]) == (f"job {job_id}", job_id, True, 4096.0)
    assert (script["who"], script["job"], script["is_own"], script["pid"]) == ("a script", None, False, os.getpid())
    assert script["measured_mb"] == 2048.0
    assert "processes" not in first
    assert first["is_usable"]
    past = history["devices"]["SIM-1"]
    assert past["others_mb"] == past["used_mb"]
    assert 0.0 < max(history["devices"]["SIM-0"]["foreign_mb"]) <= 1024.0
    assert (history["span_s"], history["step_s"]) == (600, 2.0)
    assert {len(column) for column in past.values()} == {len(past["at"])}
    with pytest.raises(UserError, match="span: cannot be '3w'"):
        queue.get("/devices/history", span="3w")


def test_the_timeline_has_past_and_current_attempts_of_each_device(queue: QueueUnderTest) -> None:
    began = time.time()
    both = queue.submit("true", gpus=2, name="both")
    plain = queue.submit("sh", "-c", "exit 3", gpus=0)
    queue.wait(f"{both} {plain}")
    running, _ = queue.start_gated(vram="4G", device="1")
    timeline = queue.get("/timeline", span="10m", until=str(time.time() + 1))
    lanes = [(lane["device"], lane["label"]) for lane in timeline["lanes"]]
    assert lanes == [("SIM-0", "GPU 0"), ("SIM-1", "GPU 1"), (None, "CPU")]
    by_job = {job: [each for each in timeline["stretches"] if each["job"] == job] for job in (both, plain, running)}
    assert sorted(each["lane"] for each in by_job[both]) == [0, 1]
    assert {(each["name"], each["outcome"], each["command"]) for each in by_job[both]} == {
        ("both", "succeeded", "true")
    }
    (failed,), (runs,) = by_job[plain], by_job[running]
    assert (failed["lane"], failed["outcome"], failed["state"]) == (2, "failed", "ended")
    assert began < failed["from"] <= failed["until"] < time.time()
    assert (runs["lane"], runs["state"], runs["until"], runs["reserved_mb"]) == (1, "running", None, 4096.0)
    assert timeline["left_out"] == 0
    before = queue.get("/timeline", span="10m", until=str(began - 1))
    assert (before["stretches"], len(before["lanes"])) == ([], 2)


def ids(answer: Any) -> list[int]:
    return [job["id"] for job in answer["jobs"]]


def test_each_page_is_a_part_of_the_whole_list_and_all_matching_jobs_can_be_changed_at_once(
    queue: QueueUnderTest,
) -> None:
    queue.post("/pause")
    for priority in (0, 5):
        queue.submit("train", "--lr", "{lr}", sweep=["lr=1,2,3"], gpus=0, priority=priority, tag=f"p{priority}")
    queue.submit("other", gpus=0, hold=True, name="apart")
    whole = queue.get("/jobs", limit="100")
    assert (ids(whole), whole["total"], whole["next"]) == ([4, 5, 6, 1, 2, 3, 7], 7, None)
    pages = [queue.get("/jobs", limit="2", after=str(offset)) for offset in (0, 2, 4, 6, 8)]
    assert [job_id for page in pages for job_id in ids(page)] == ids(whole)
    assert [(page["next"], page["total"]) for page in pages] == [(2, 7), (4, 7), (6, 7), (None, 7), (None, 7)]
    assert pages[1]["jobs"] == [{**job, "waited_s": pages[1]["jobs"][place]["waited_s"]}
                                for place, job in enumerate(whole["jobs"][2:4])]  # fmt: skip
    assert ids(queue.get("/jobs", order="newest", limit="2")) == [7, 6]
    assert ids(queue.get("/jobs", search="--lr 2")) == [5, 2]
    assert ids(queue.get("/jobs", search="--lr 2", tag="p0")) == [2]
    assert ids(queue.get("/jobs", ids="2-5", state="queued", after="1")) == [3, 4, 5]
    changed = queue.post("/jobs/hold", where={"search": "--lr 2"})
    assert (changed["changed"], changed["count"]) == ("2 5", 2)
    assert ids(queue.get("/jobs", state="held", search="lr")) == [2, 5]
    assert queue.post("/jobs/priority", where={"tag": "p5", "state": "queued"}, priority=9)["changed"] == "4 6"
    assert queue.post("/jobs/cancel", where={"search": "nothing"})["count"] == 0
    for nonsense in ({}, {"states": "held"}, "all", {"state": "old"}, {"search": " "}, {"state": ","}):
        with pytest.raises(UserError):
            queue.post("/jobs/cancel", where=nonsense)
    with pytest.raises(UserError, match="order"):
        queue.get("/jobs", order="oldest")
    assert queue.post("/jobs/cancel", where={"state": "queued,held"})["count"] == 7
    failed = queue.get("/jobs", state="cancelled", limit="3", after="5")
    assert (len(failed["jobs"]), failed["total"]) == (2, 7)


@contextlib.contextmanager
def follow(queue: QueueUnderTest, path: str) -> Iterator[Iterator[Any]]:
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(DEADLINE_S)
        user_sockets.reach(str(queue.home / "daemon.sock"), link.connect)
        link.sendall(f"GET /v1{path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        with link.makefile("rb") as lines:
            yield (json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: "))


def test_a_log_is_read_from_its_end_and_followed_from_one_attempt_to_the_next(
    queue: QueueUnderTest, tmp_path: Path
) -> None:
    gate, mark = queue.gate(), tmp_path / "tried"
    script = f"printf 'caf\\303\\251\\n'; read word < {gate}; echo $word; test -e {mark} || {{ : > {mark}; exit 1; }}"
    job_id = queue.shell(script, gpus=0, retries=1)
    until(lambda: queue.get(f"/jobs/{job_id}/log")["text"] == "café\n", "its first line")
    assert queue.get(f"/jobs/{job_id}/log", tail="2") == {
        "id": job_id, "attempt": 1, "text": "\n", "is_cut": True, "is_over": False,
    }  # fmt: skip
    with follow(queue, f"/jobs/{job_id}/log/live") as events:
        assert next(events) == {"text": "café\n"}
        gate.write_text("once\n", encoding="utf-8")
        assert next(events) == {"text": "once\n"}
        assert next(events) == {"attempt": 2}
        text = next(events)["text"]
        gate.write_text("again\n", encoding="utf-8")
        while (following := next(events)) != {"over": True}:
            text += following["text"]
        assert text == "café\nagain\n"
    with follow(queue, f"/jobs/{job_id}/log/live?attempt=1&tail=5") as events:
        assert list(events) == [{"text": "once\n"}, {"over": True}]
    whole = queue.get(f"/jobs/{job_id}/log", attempt="1")
    assert (whole["text"], whole["is_cut"], whole["is_over"]) == ("café\nonce\n", False, True)
    waiting = queue.submit("true", gpus=0, hold=True)
    assert queue.get(f"/jobs/{waiting}/log")["attempt"] is None
    for path in (f"/jobs/{job_id}/log?attempt=3", "/jobs/999/log", "/jobs/999/log/live"):
        route, _, query = path.partition("?")
        with pytest.raises(UserError, match="no"):
            queue.get(route, **dict([query.split("=")] if query else []))


def test_a_resubmitted_job_keeps_its_directory_and_environment_except_for_the_changes(
    queue: QueueUnderTest, tmp_path: Path
) -> None:
    environment = {"PATH": os.environ["PATH"], "WORD": "kept"}
    before = queue.submit(
        "sh", "-c", "pwd; echo $WORD", cwd=str(tmp_path), environment=environment, vram="1G", name="a"
    )
    queue.wait(before)
    again = queue.post(f"/jobs/{before}/resubmit")["first"]
    other = queue.post(
        f"/jobs/{before}/resubmit", command="echo 'x y'", options={"gpus": 0, "priority": 4, "name": "b"}
    )
    queue.wait()
    assert queue.log_of(again) == queue.log_of(before) == f"{tmp_path}\nkept\n"
    assert queue.log_of(other["first"]) == "x y\n"
    same, shown = queue.job(again), queue.job(other["first"])
    assert (same["name"], same["vram_mb"], same["attempt"]) == ("a", 1024.0, 1)
    assert (shown["name"], shown["gpus"], shown["priority"], shown["cwd"]) == ("b", 0, 4, str(tmp_path))
    assert "WORD" in shown["environment_names"]
    with pytest.raises(UserError, match="size"):
        queue.post(f"/jobs/{before}/resubmit", options={"vram": "much"})
    with pytest.raises(UserError, match="no job 999"):
        queue.post("/jobs/999/resubmit")
    batch = queue.submit("true", gpus=0, concurrency=1, sweep=["seed=1,2"])
    with pytest.raises(UserError, match="batch"):
        queue.post(f"/jobs/{batch}/resubmit")
    queue.wait()
