"""Links in the outputs of vendors' tools, in the formats that releases print."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.errors import ProbeError, ProbeGarbled
from gpuyard.model.machine_snapshot import Device, Vendor
from gpuyard.model.topology import Topology
from gpuyard.probes.vendor_links import parse_amd_smi, parse_rocm_smi, parse_topo

# The header is underlined, its columns do not line up, and there are network adapters.
WITH_ADAPTERS = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV12\tPXB\tSYS\tPIX\tSYS\t0-31,64-95\t0\t\tN/A\n"
    "GPU1\tNV12\t X \tPHB\tSYS\tNODE\tSYS\t0-31,64-95\t0\t\tN/A\n"
    "GPU2\tPXB\tPHB\t X \tNODE\tSYS\tSYS\t32-63,96-127\t1\t\tN/A\n"
    "GPU3\tSYS\tSYS\tNODE\t X \tSYS\tPIX\t32-63,96-127\t1\t\tN/A\n"
    "NIC0\tPIX\tNODE\tSYS\tSYS\t X \tSYS\t\t\t\t\n"
    "NIC1\tSYS\tSYS\tSYS\tPIX\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n\n"
    "NIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n\n"
)
# As releases before 450 print it: spaces, no NUMA nodes, and other words.
OLD = """\
        GPU0    GPU1    GPU2    CPU Affinity
GPU0     X      NV2     SOC     0-19,40-59
GPU1    NV2      X      PIX     0-19,40-59
GPU2    SOC     PIX      X      20-39,60-79
"""
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


NVIDIA, AMD = cards(Vendor.NVIDIA), cards(Vendor.AMD)


def kinds(topology: Topology) -> dict[str, str]:
    """Return the links as {"01": "nvlink 12"}."""
    return {
        f"{link.one}{link.other}".replace("G", ""): f"{link.kind} {link.count or ''}".strip() for link in topology.links
    }


def test_the_matrix_of_nvidia_smi_is_read_without_network_adapters() -> None:
    found = parse_topo(WITH_ADAPTERS, NVIDIA)
    assert kinds(found) == {
        "01": "nvlink 12", "02": "pcie-switch", "03": "across-nodes", "12": "host-bridge", "13": "across-nodes",
        "23": "same-node",
    }  # fmt: skip
    assert found.nodes == {"G0": 0, "G1": 0, "G2": 1, "G3": 1}


def test_an_old_matrix_has_no_nodes() -> None:
    found = parse_topo(OLD, NVIDIA)
    assert kinds(found) == {"01": "nvlink 2", "02": "across-nodes", "12": "pcie-switch"}
    assert found.nodes == {}


def test_a_card_that_no_probe_listed_is_left_out() -> None:
    assert kinds(parse_topo(WITH_ADAPTERS, NVIDIA[:2])) == {"01": "nvlink 12"}


@pytest.mark.parametrize("affinity", ["N/A", "0-1", "", "99999999"])
def test_a_node_that_is_no_number_is_unknown(affinity: str) -> None:
    text = f"\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tSYS\t0-7\t{affinity}\nGPU1\tSYS\t X \t0-7\t0\n"
    assert parse_topo(text, NVIDIA).nodes == {"G1": 0}


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


def test_amd_smi_may_put_its_list_into_an_object() -> None:
    text = json.dumps({"gpu_data": json.loads(amd_smi((0, 1, "XGMI", "ENABLED")))})
    assert kinds(parse_amd_smi(text, AMD)) == {"01": "xgmi"}


@pytest.mark.parametrize(
    ("parse", "text"),
    [(parse_topo, "No devices were found"), (parse_rocm_smi, "ERROR: GPU[0]"), (parse_amd_smi, "not JSON"),
     (parse_amd_smi, "{}"), (parse_amd_smi, "[" * 5000)],
)  # fmt: skip
def test_an_output_without_links_is_refused(parse: object, text: str) -> None:
    with pytest.raises(ProbeGarbled):
        parse(text, AMD)  # type: ignore[operator]


@given(st.sampled_from([WITH_ADAPTERS, OLD, ROCM, amd_smi((0, 1, "XGMI", "ENABLED"))]), st.data())
def test_a_damaged_output_gives_links_or_a_probe_error(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    damaged = text[:start] + data.draw(st.text(max_size=20)) + text[start + data.draw(st.integers(0, 40)) :]
    for parse in (parse_topo, parse_rocm_smi, parse_amd_smi):
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
