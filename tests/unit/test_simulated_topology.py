"""The links of simulated devices, as GPUYARD_SIMULATE describes them."""

import pytest

from gpuyard.errors import UserError
from gpuyard.model.topology import LinkKind, Topology, topology_as_dict
from gpuyard.simulated_usage import parse_devices, parse_topology


def topology(spec: str) -> Topology:
    return parse_topology(spec, parse_devices(spec))


def test_links_and_nodes_of_simulated_devices() -> None:
    found = topology("8x80GB:links=0-3,4-7")
    assert found.joined_groups([f"SIM-{number}" for number in range(8)]) == [
        [f"SIM-{number}" for number in group] for group in (range(4), range(4, 8))
    ]
    assert found.kind("SIM-0", "SIM-4") is LinkKind.UNKNOWN
    assert found.nodes == {}, "groups are joined each with each"
    found = topology("4x80GB:nodes=0-1,2-3:links=1-2")
    assert found.nodes == {"SIM-0": 0, "SIM-1": 0, "SIM-2": 1, "SIM-3": 1}
    kinds = [found.kind("SIM-1", f"SIM-{number}") for number in (0, 2, 3)]
    assert kinds == [LinkKind.SAME_NODE, LinkKind.NVLINK, LinkKind.ACROSS_NODES], "nodes say what is not linked"
    assert topology("6x24GB:links=0+2+4-5").linked_to("SIM-0") == ["SIM-2", "SIM-4", "SIM-5"], "a group may have gaps"
    found = topology("nvidia:2x24GB,amd:2x16GB:links=0-1,2-3")
    assert found.kind("SIM-nvidia-0", "SIM-nvidia-1") is LinkKind.NVLINK
    assert found.kind("SIM-amd-0", "SIM-amd-1") is LinkKind.XGMI, "devices of all vendors are counted through"
    assert parse_devices("2x24GB:links=0-1") == parse_devices("2x24GB"), "links do not change the devices"


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("4x80GB:links=0-4", "links= names GPU 4, and there are 4 simulated GPUs"),
        ("4x80GB:links=0-2,2-3", "GPU 2 is in links twice"),
        ("4x80GB:links=0-1+1", "GPU 1 is in links twice"),
        ("4x80GB:links=3-1", "'3-1' in links= is an empty range"),
        ("4x80GB:links=", "'' in links= is no GPU"),
        ("4x80GB:links=a", "'a' in links= is no GPU"),
        ("4x80GB:nodes=0-1,x", "'x' in nodes= is no GPU"),
        ("4x80GB:links=0-1:links=2-3", "has links twice"),
        ("4x80GB:link=0-1", "'link=0-1' says nothing about simulated devices"),
        ("4x80GB:links=0-1:", "'' says nothing about simulated devices"),
        ("nvidia:1x24GB,amd:1x16GB:links=0-1", "GPUs of two vendors"),
        ("links=0-1", "'links=0-1' does not describe simulated devices"),
    ],
)
def test_bad_links_are_refused_with_what_is_wrong(spec: str, complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        topology(spec)
    assert complaint in str(caught.value)
    assert caught.value.hint


def test_json_has_every_pair_and_null_for_the_unknown() -> None:
    assert topology_as_dict(topology("3x8GB:links=0-1"), ["SIM-0", "SIM-1", "SIM-2"]) == {
        "nodes": {"SIM-0": None, "SIM-1": None, "SIM-2": None},
        "links": [
            {"one": "SIM-0", "other": "SIM-1", "kind": "nvlink", "count": 12},
            {"one": "SIM-0", "other": "SIM-2", "kind": None, "count": None},
            {"one": "SIM-1", "other": "SIM-2", "kind": None, "count": None},
        ],
    }
