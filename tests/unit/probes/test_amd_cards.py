"""Ids, names and memory, which all AMD probes derive in the same way."""

import pytest

from gpuyard.probes.amd import amd_smi


@pytest.mark.parametrize(
    ("printed", "digits"),
    [
        ("0x2150e7d042a1124", "02150e7d042a1124"), ("0xAF54E92B0A5D57C8", "af54e92b0a5d57c8"),
        ("71660a3c71d5f817", "71660a3c71d5f817"), ("GPU-71660A3C71D5F817", "71660a3c71d5f817"),
        ("0x0000000000000000", None), ("0xffffffffffffffff", None), ("0x10000000000000000", None), ("111", None),
        ("N/A", None), (7, None), (None, None),
    ],
)  # fmt: skip
def test_a_unique_id_is_sixteen_digits_or_none(printed: object, digits: str | None) -> None:
    assert amd_smi.unique_id(printed) == digits


@pytest.mark.parametrize(
    ("printed", "digits"),
    [
        ("c7ff74a1-0000-1000-8012-34567890abcd", "c71234567890abcd"),
        ("C70174A1-0000-1000-8012-34567890ABCD", "c71234567890abcd"),
        ("00ff150e-0000-1000-8000-000000000000", None),
        ("00ff7550-0000-1000-8000-000000030000", None),
        ("c7ff74a1-1111-4000-9012-34567890abcd", None),
        (["c7ff74a1"], None),
    ],
    ids=[
        "of a card",
        "of a partition, in capitals",
        "without one",
        "made of a PCI address",
        "of another make",
        "no text",
    ],
)
def test_the_unique_id_is_read_out_of_the_uuid(printed: object, digits: str | None) -> None:
    assert amd_smi.unique_id_in_uuid(printed) == digits


def test_ids_names_and_memory_are_the_best_that_are_known() -> None:
    assert amd_smi.device_id("00000000000000ab", "0000:01:00.0", 3) == "GPU-00000000000000ab"
    assert amd_smi.device_id(None, "0000:01:00.0", 3) == "0000:01:00.0"
    assert amd_smi.device_id(None, None, 3) == "amd-3"
    assert amd_smi.card_name("0x1002", "N/A", None, "Navi 31") == "Navi 31"
    assert amd_smi.card_name("0x1002") is None
    assert amd_smi.memory(100.0, 30.0)["memory_free_mb"] == 70.0
    assert amd_smi.memory(100.0, 30.0, 69.0)["memory_free_mb"] == 69.0
    assert amd_smi.memory(100.0, 130.0)["memory_free_mb"] == 0.0
    assert amd_smi.memory(100.0, None)["memory_free_mb"] is None
    assert set(amd_smi.memory(0.0, 0.0, 0.0).values()) == {None}


@pytest.mark.parametrize(
    ("parts", "whole", "memory_mb"),
    [
        ({"vram_mem": 2097152, "gtt_mem": 1048576}, 0, 2.0),
        ({"vram_mem": 2097152, "gtt_mem": 1048576}, 9437184, 2.0),
        ({"vram_mem": 0, "gtt_mem": 0, "cpu_mem": 0}, 3145728, 3.0),
        ({"vram_mem": 0, "gtt_mem": 3145728}, 3145728, 0.0),
        ({"vram_mem": 0, "gtt_mem": 0}, 0, None),
        ({"vram_mem": 0}, "N/A", None),
        ("N/A", 3145728, 3.0),
        ("N/A", 0, None),
        (None, "N/A", None),
    ],
    ids=[
        "the whole is zero",
        "the whole is more than the card's",
        "parts are hidden",
        "all outside the card",
        "nothing at all",
        "nothing, and no whole",
        "no parts",
        "no parts and no whole",
        "not said",
    ],
)
def test_the_memory_of_a_process_is_its_vram(parts: object, whole: object, memory_mb: float | None) -> None:
    assert amd_smi.process_memory(parts, whole) == memory_mb


@pytest.mark.parametrize("pid", [0, -1, 1.5, "N/A", None, 2**31, 1e300])
def test_an_invalid_pid_is_not_a_process(pid: object) -> None:
    assert amd_smi.process(pid, "python", 1.0) is None
