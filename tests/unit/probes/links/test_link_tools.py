"""Links in the outputs of vendors' tools, in the formats that releases print."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.errors import ProbeError, ProbeGarbled
from gpuyard.model.machine_snapshot import Device, Vendor
from gpuyard.model.topology import Topology
from gpuyard.probes.device_links import parse_amd_smi, parse_rocm_smi

ROCM = """

============================ ROCm System Management Interface ============================
================================ Weight between two GPUs =================================
       GPU0         GPU1         GPU2
GPU0   0            15           40
GPU1   15           0            40
GPU2   40           40           0

=============================== Link Type between two GPUs ===============================
       GPU0         GPU1         GPU2
GPU0   0            XGMI         PCIE
GPU1   XGMI         0            PCIE
GPU2   PCIE         PCIE         0

======================================= Numa Nodes =======================================
GPU[0]\t\t: (Topology) Numa Node: 0
GPU[0]\t\t: (Topology) Numa Affinity: 0
GPU[1]\t\t: (Topology) Numa Node: 0
GPU[1]\t\t: (Topology) Numa Affinity: 0
GPU[2]\t\t: (Topology) Numa Node: 1
GPU[2]\t\t: (Topology) Numa Affinity: 1
================================== End of ROCm SMI Log ===================================
"""


def amd_smi(*types: tuple[int, int, str, str]) -> str:
    cards = []
    for one in range(3):
        links = [
            {"gpu": other, "bdf": f"0000:{other + 1:02x}:00.0", "link_status": status, "link_type": kind}
            for first, other, kind, status in types
            if first == one
        ]
        cards.append({"gpu": one, "bdf": f"0000:{one + 1:02x}:00.0", "links": links})
    return json.dumps(cards)


def cards(vendor: Vendor, count: int = 4) -> list[Device]:
    return [
        Device(id=f"G{index}", vendor=vendor, index=index, pci_bus_id=f"0000:{index + 1:02x}:00.0")
        for index in range(count)
    ]


AMD = cards(Vendor.AMD)


def kinds(topology: Topology) -> dict[str, str]:
    """Return the links as {"01": "nvlink 12"}."""
    return {
        f"{link.one}{link.other}".replace("G", ""): f"{link.kind} {link.count or ''}".strip() for link in topology.links
    }


def test_rocm_smi_says_which_cards_xgmi_joins_and_leaves_pcie_open() -> None:
    found = parse_rocm_smi(ROCM, AMD)
    assert kinds(found) == {"01": "xgmi"}
    assert found.nodes == {"G0": 0, "G1": 0, "G2": 1}


def test_amd_smi_identifies_cards_by_their_bus_and_not_by_their_place() -> None:
    text = amd_smi(
        (0, 0, "SELF", "ENABLED"), (0, 2, "XGMI", "ENABLED"), (0, 1, "PCIE", "ENABLED"), (1, 2, "XGMI", "DISABLED")
    )
    renumbered = [Device(id=each.id, vendor=each.vendor, index=9, pci_bus_id=each.pci_bus_id) for each in AMD]
    assert kinds(parse_amd_smi(text, renumbered)) == {"02": "xgmi"}
    text = json.dumps({"gpu_data": json.loads(amd_smi((0, 1, "XGMI", "ENABLED")))})
    assert kinds(parse_amd_smi(text, AMD)) == {"01": "xgmi"}


@pytest.mark.parametrize(
    ("parse", "text"),
    [(parse_rocm_smi, "ERROR: GPU[0]"), (parse_amd_smi, "not JSON"),
     (parse_amd_smi, "{}"), (parse_amd_smi, "[" * 5000)],
)  # fmt: skip
def test_an_output_without_links_is_refused(parse: object, text: str) -> None:
    with pytest.raises(ProbeGarbled):
        parse(text, AMD)  # type: ignore[operator]


@given(st.sampled_from([ROCM, amd_smi((0, 1, "XGMI", "ENABLED"))]), st.data())
def test_a_damaged_output_gives_links_or_a_probe_error(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    damaged = text[:start] + data.draw(st.text(max_size=20)) + text[start + data.draw(st.integers(0, 40)) :]
    for parse in (parse_rocm_smi, parse_amd_smi):
        try:
            found = parse(damaged, AMD)
        except ProbeError:
            continue
        assert all({link.one, link.other} <= {"G0", "G1", "G2", "G3"} for link in found.links)


@given(st.recursive(st.none() | st.integers() | st.text(), lambda each: st.lists(each) | st.dictionaries(
    st.sampled_from(["gpu", "bdf", "links", "link_type", "x"]), each)))  # fmt: skip
def test_any_json_gives_links_or_a_probe_error(content: object) -> None:
    with contextlib.suppress(ProbeError):
        assert parse_amd_smi(json.dumps(content), AMD).nodes == {}
