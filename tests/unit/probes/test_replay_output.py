"""Saved outputs in common encodings."""

import codecs

import pytest

from gpuyard.probes.local_machine import replay
from tests.unit.probes.samples_nvidia import CSV, XML


@pytest.mark.parametrize(
    "saved",
    [
        CSV.encode(),
        CSV.encode("utf-8-sig"),
        codecs.BOM_UTF16_LE + CSV.encode("utf-16-le"),
        codecs.BOM_UTF16_BE + CSV.encode("utf-16-be"),
        codecs.BOM_UTF16_LE + CSV.replace("\n", "\r\n").encode("utf-16-le"),
    ],
    ids=["UTF-8", "UTF-8 with a mark", "UTF-16", "UTF-16, big end first", "PowerShell"],
)
def test_the_encoding_is_detected_by_the_first_bytes(saved: bytes) -> None:
    assert replay("nvidia-smi-csv", saved) == replay("nvidia-smi-csv", CSV.encode())
    assert len(replay("nvidia-smi-csv", saved).devices) == 2


def test_undecodable_bytes_are_tolerated() -> None:
    torn = codecs.BOM_UTF16_LE + XML.encode("utf-16-le") + b"\x00"
    assert len(replay("nvidia-smi-xml", torn).devices) == 2
    assert len(replay("nvidia-smi-xml", b"\xff\xc0" + XML.encode()).devices) == 2
