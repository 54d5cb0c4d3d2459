"""`/metrics` of a real queue agrees with `gpuyard queue`, and counts past events."""

import contextlib
import fcntl
import http.client
import json
import os
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.queue_command import run
from tests.integration.queue_fixture import DEADLINE_S, QueueUnderTest, until

GIB = 1024**3
SHORT_OF_MEMORY = (
    "[ $GPUYARD_OOM_COUNT != 0 ] || "
    "{ echo 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.' >&2; exit 1; }"
)


@pytest.fixture
def card(own_queue: QueueUnderTest, monkeypatch: pytest.MonkeyPatch) -> QueueUnderTest:
    monkeypatch.setenv("GPUYARD_SIMULATE", "1x24GB")
    own_queue.start()
    return own_queue


@contextlib.contextmanager
def dialled(queue: QueueUnderTest) -> Iterator[http.client.HTTPConnection]:
    with contextlib.closing(http.client.HTTPConnection("gpuyard")) as connection:
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(DEADLINE_S)
        connection.sock.connect(str(queue.home / "daemon.sock"))
        yield connection


def scrape(queue: QueueUnderTest) -> dict[tuple[str, str], float]:
    """Return the values by name and first label."""
    with dialled(queue) as connection:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        assert (response.status, response.headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        families = list(text_string_to_metric_families(response.read().decode()))
    return {(one.name, next(iter(one.labels.values()), "")): one.value for each in families for one in each.samples}


def nonzero_by_label(series: dict[tuple[str, str], float], name: str) -> dict[str, float]:
    """Return the nonzero values of a metric by label."""
    return {label: value for (known, label), value in series.items() if known == f"gpuyard_{name}" and value}


def queue_counts() -> dict[str, int]:
    answer: Any = json.loads(run("queue", "--json").stdout)
    return {state: count for state, count in answer["counts"].items() if count}


def test_a_scrape_agrees_with_the_queue_and_with_what_ran(card: QueueUnderTest) -> None:
    short = card.shell(SHORT_OF_MEMORY, vram="2G")
    failing = card.shell("exit 3", gpus=0)
    card.wait(f"{short} {failing}")
    holder, gate = card.start_gated(vram="16G")
    waiting = card.submit("true", vram="12G")
    until(lambda: nonzero_by_label(scrape(card), "out_of_memory_avoided_total"), "the avoided out-of-memory failure")

    series = scrape(card)
    assert (
        nonzero_by_label(series, "jobs") == queue_counts() == {"succeeded": 1, "failed": 1, "running": 1, "queued": 1}
    )
    assert nonzero_by_label(series, "starts_total") == {"": 4}
    assert nonzero_by_label(series, "attempts_ended_total") == {"out-of-memory": 1, "failed": 1, "succeeded": 1}
    assert nonzero_by_label(series, "out_of_memory_total") == {"device": 1}
    assert nonzero_by_label(series, "leases") == {"own": 1}
    memory = {name: series[f"gpuyard_device_memory_{name}_bytes", "SIM-0"] / GIB for name in ("own", "free", "used")}
    assert memory == {"own": 16, "free": 8, "used": 0}

    gate.write_text("go\n")
    card.wait(f"{holder} {waiting}")
    series = scrape(card)
    assert nonzero_by_label(series, "jobs") == nonzero_by_label(series, "jobs_finished_total") == queue_counts()
    assert nonzero_by_label(series, "out_of_memory_avoided_total") == {"": 1}
    for name in ("wait_seconds_count", "run_seconds_count"):
        assert nonzero_by_label(series, name) == nonzero_by_label(series, "starts_total") == {"": 5}
    assert series["gpuyard_wait_seconds_sum", ""] > 0
    assert series["gpuyard_step_seconds_count", ""] >= 5
    until(lambda: not nonzero_by_label(scrape(card), "leases"), "the end of the leases")


@pytest.mark.usefixtures("unmeasured")
def test_prometheus_reads_it_from_the_page_with_its_token(card: QueueUnderTest) -> None:
    page = urlsplit(card.post("/web", port=0)["url"])
    token = (card.home / "web.token").read_text()
    seen = []
    for headers in ({"Authorization": f"Bearer {token}"}, {}):
        with contextlib.closing(http.client.HTTPConnection(page.netloc, timeout=DEADLINE_S)) as connection:
            connection.request("GET", "/metrics", headers=headers)
            response = connection.getresponse()
            seen.append((response.status, b"gpuyard_build_info" in response.read()))
    assert seen == [(200, True), (401, False)]


def test_an_unreadable_ledger_omits_only_the_metrics_of_leases(card: QueueUnderTest) -> None:
    folder = card.home / "locks"
    folder.rename(card.home / "moved")
    folder.touch()
    until(lambda: not has_leases(scrape(card)), "a scrape without the ledger")
    folder.unlink()
    (card.home / "moved").rename(folder)
    until(lambda: has_leases(scrape(card)), "a scrape with the ledger")


def test_a_ledger_locked_by_another_process_omits_no_metrics(card: QueueUnderTest) -> None:
    folder = os.open(card.home / "locks", os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    assert has_leases(scrape(card))
    os.close(folder)


def has_leases(series: dict[tuple[str, str], float]) -> bool:
    assert series["gpuyard_device_memory_total_bytes", "SIM-0"] == 24 * GIB
    found = {key in series for key in (("gpuyard_leases", "own"), ("gpuyard_device_memory_own_bytes", "SIM-0"))}
    assert len(found) == 1
    return found.pop()
