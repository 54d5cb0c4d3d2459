"""A figure that no probe can read does not block a batch: it uses the other figures, and reports the missing ones."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.sim_view_fixture import RAM_MB, Batch, make_batch, percent_of, put_sim_view, quiet_daemon  # noqa: F401 - fixtures are found where they are named
from tests.integration.test_batch_gates import check_launches
from tests.scale import some

Tools = Callable[[str, str], Path]

CARD_ID = "GPU-11111111-0000-0000-0000-000000000001"
CARD = """<nvidia_smi_log><gpu id="00000000:01:00.0"><product_name>NVIDIA Test One</product_name>
<uuid>{id}</uuid>
<fb_memory_usage><total>{memory}</total><used>{used}</used><free>{memory}</free></fb_memory_usage>
<utilization><gpu_util>{load}</gpu_util></utilization><processes></processes></gpu></nvidia_smi_log>
"""
WHOLE = {"id": CARD_ID, "memory": "24576 MiB", "used": "0 MiB", "load": "7 %"}
# The output of the tool, the host's figures that cannot be read, and the thresholds that are not enforced.
MISSING: dict[str, tuple[dict[str, str] | None, tuple[str, ...], tuple[str, ...]]] = {
    "any GPU": (None, (), ("--max-gpu", "--max-gpu-mem-mb")),
    "the GPU's load": ({**WHOLE, "load": "N/A"}, (), ("--max-gpu",)),
    "the GPU's memory": ({**WHOLE, "memory": "N/A", "used": "N/A"}, (), ("--max-gpu-mem-mb",)),
    "the CPU's load": (WHOLE, ("cpu_percent",), ("--max-cpu",)),
    "RAM": (WHOLE, ("memory_available_mb", "memory_total_mb"), ("--min-free-mem-mb",)),
    "everything": (None, ("cpu_percent", "memory_available_mb", "memory_total_mb"),
                   ("--max-cpu", "--min-free-mem-mb", "--max-gpu", "--max-gpu-mem-mb")),
}  # fmt: skip


@pytest.fixture(autouse=True)
def only_stand_ins(batch: Batch, tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the GPUs of this machine: only the tools of the test are on PATH."""
    monkeypatch.delenv("GPUYARD_SIMULATE")
    monkeypatch.setenv("PATH", os.pathsep.join(str(tmp_path / name) for name in ("tools", "bin")))


@pytest.mark.parametrize("missing", some(MISSING, 0, len(MISSING) - 1))
def test_a_batch_completes_without(missing: str, batch: Batch, tools: Tools) -> None:
    card, hidden, unknown = MISSING[missing]
    if card is not None:
        # A shell script, which answers within the daemon's deadline for a sample even on a slow machine.
        tools("nvidia-smi", f"#!/bin/sh\n/bin/cat <<'END'\n{CARD.format(**card)}END\n")
    bounds = {"max_cpu": percent_of(1.5), "min_free_mem_mb": round(0.3 * RAM_MB), "max_gpu": 60,
              "max_gpu_mem_mb": 8000}  # fmt: skip
    batch.queue.start(quiet_daemon(*hidden))
    batch.begin(4, ["--seconds", "0.1"], concurrency=2, run_vram="1000M", **bounds)
    summary = batch.finished()
    assert (summary.succeeded, set(summary.unknown)) == (4, set(unknown))
    assert sorted(entry.seed for entry in batch.entries("ends")) == [0, 1, 2, 3]
    assert card is None or {entry.device for entry in batch.entries()} == {"0"}
    known = {name: bound for name, bound in bounds.items() if f"--{name.replace('_', '-')}" not in unknown}
    check_launches(batch, 4, known)
    assert batch.queue.daemon is not None
    for bound in unknown:
        assert batch.queue.daemon.log.count(f"{bound} is not enforced") == 1
    assert batch.queue.daemon.log.count("is not enforced") == len(unknown)


def test_a_job_starts_even_when_every_sample_takes_long(batch: Batch, tools: Tools) -> None:
    answer = f"/bin/cat <<'END'\n{CARD.format(**WHOLE)}END"
    tools("nvidia-smi", f"#!/bin/sh\n/bin/sleep 0.5\n{answer}\n")
    batch.queue.start(quiet_daemon())
    assert batch.queue.wait(batch.queue.submit("/bin/true"))["succeeded"] == 1
