"""`/metrics` as prometheus-client parses it, and the dashboard that shows it."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from gpuyard.daemon.metrics import EventCounters, Scrape, write_metrics
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Host, Snapshot
from gpuyard.policy.device_state import PromisedShare, break_down
from tests.unit.policy.test_placement import ALICE, BOB, GB, card, lease, machine

DASHBOARD = Path(__file__).parents[4] / "docs/grafana.json"
BYTES = 1024**2
EMPTY = Snapshot(taken_at=0.0, host=Host())
NOTHING = Scrape(
    started_at=1.0, is_paused=False, counts=dict.fromkeys(JobState, 0), snapshot=EMPTY, breakdowns={}, leases={},
    counters=EventCounters(),
)  # fmt: skip
CARD = card(0, used=6 * GB, temperature_c=60.0, power_limit_w=300.0, name="A card")
PROMISES = [
    PromisedShare(share=each.shares[0], holder=holder, measured_mb=used, lease_id=each.id)
    for each, holder, used in (
        (lease("own", "G0", memory_mb=12 * GB), ALICE, 3 * GB),
        (lease("other", "G0", memory_mb=1 * GB), BOB, 2 * GB),
    )
]
ALL = replace(
    NOTHING, snapshot=machine(CARD, host=Host(cpu_percent=25.0, memory_total_mb=4096.0, memory_available_mb=1024.0)),
    breakdowns={"G0": break_down(CARD, PROMISES, {"own"})}, leases={"own": 1, "others": 2},
)  # fmt: skip
Series = dict[tuple[str, str], float]


def families_of(scrape: Scrape) -> list[Metric]:
    return list(text_string_to_metric_families(write_metrics(scrape).decode()))


def samples_of(scrape: Scrape) -> list[Sample]:
    return [sample for family in families_of(scrape) for sample in family.samples]


def series_of(scrape: Scrape) -> Series:
    """Return the values by name and by the value of the first label, if any."""
    return {(one.name, next(iter(one.labels.values()), "")): one.value for one in samples_of(scrape)}


def series_of_counters(counters: EventCounters) -> Series:
    return series_of(replace(NOTHING, counters=counters))


def test_the_parts_of_a_devices_memory_add_up() -> None:
    series = series_of(ALL)
    parts = {name: series[f"gpuyard_device_memory_{name}_bytes", "G0"] / GB / BYTES for name in
             ("own", "own_used", "others", "others_used", "foreign", "free", "used", "total")}  # fmt: skip
    assert parts == {
        "own": 12, "own_used": 3, "others": 2, "others_used": 2, "foreign": 1, "free": 9, "used": 6, "total": 24,
    }  # fmt: skip
    assert [series["gpuyard_leases", whose] for whose in ("own", "others")] == [1, 2]


def test_percentages_become_ratios_and_megabytes_bytes() -> None:
    series = series_of(replace(ALL, snapshot=replace(ALL.snapshot, devices=(replace(CARD, utilization_percent=87.5),))))
    assert series["gpuyard_device_utilization_ratio", "G0"] == 0.875
    assert series["gpuyard_host_cpu_ratio", ""] == 0.25
    assert series["gpuyard_host_memory_available_bytes", ""] == 1024 * BYTES


def test_an_unknown_value_is_left_out_rather_than_zero() -> None:
    unknown = card(1, used=None, power_draw_w=None, fault="it has vanished")
    series = series_of(replace(NOTHING, snapshot=machine(CARD, unknown, host=Host(cpu_percent=25.0))))
    assert [series["gpuyard_device_healthy", device] for device in ("G0", "G1")] == [1, 0]
    assert series["gpuyard_device_temperature_celsius", "G0"] == 60.0
    for name in ("memory_used_bytes", "power_watts", "temperature_celsius", "power_limit_watts"):
        assert (f"gpuyard_device_{name}", "G1") not in series
    assert ("gpuyard_device_memory_own_bytes", "G0") not in series
    assert ("gpuyard_host_memory_available_bytes", "") not in series


def names(min_size: int = 0) -> st.SearchStrategy[str]:
    special = st.sampled_from(['"', "\\", "\n", "\\n", "}", "{", ",", "=", " ", "#", "\r", "\u2028", "ä"])
    return st.lists(st.one_of(special, st.characters(codec="utf-8")), min_size=min_size, max_size=8).map("".join)


@given(names(min_size=1), names())
def test_any_text_is_read_back_from_a_label(device_id: str, name: str) -> None:
    scrape = replace(NOTHING, snapshot=machine(replace(CARD, id=device_id, name=name, index=None)))
    (healthy,) = (one for one in samples_of(scrape) if one.name == "gpuyard_device_healthy")
    assert healthy.labels == {"device": device_id, "index": "", "name": name, "vendor": "nvidia"}


@given(st.floats())
def test_any_number_is_read_back(value: float) -> None:
    read = series_of(replace(NOTHING, started_at=value))["gpuyard_daemon_start_time_seconds", ""]
    assert read == value or (math.isnan(read) and math.isnan(value))


def test_a_metric_has_its_help_its_type_and_its_samples_if_there_are_any() -> None:
    lines = write_metrics(ALL).decode().splitlines()
    assert lines[lines.index("# HELP gpuyard_starts_total Attempts that started.") :][:3] == [
        "# HELP gpuyard_starts_total Attempts that started.",
        "# TYPE gpuyard_starts_total counter",
        "gpuyard_starts_total 0.0",
    ]
    assert 'gpuyard_device_temperature_celsius{device="G0",index="0",name="A card",vendor="nvidia"} 60.0' in lines
    assert 'gpuyard_wait_seconds_bucket{le="+Inf"} 0.0' in lines
    assert b"gpuyard_device" not in write_metrics(NOTHING)
    scrape = replace(NOTHING, snapshot=machine(replace(CARD, name="a\udcff")))
    assert b'name="a?"' in write_metrics(scrape)


def test_the_queue_is_reported_by_state() -> None:
    series = series_of(replace(NOTHING, is_paused=True, counts={**NOTHING.counts, JobState.HELD: 3}))
    assert series["gpuyard_queue_paused", ""] == 1
    assert (series["gpuyard_jobs", "held"], series["gpuyard_jobs", "running"]) == (3, 0)
    assert series["gpuyard_daemon_start_time_seconds", ""] == 1.0
    assert [name for name, _ in series].count("gpuyard_build_info") == 1


@pytest.mark.parametrize("family", families_of(ALL), ids=lambda family: family.name)
def test_a_metric_follows_the_naming_rules_of_prometheus(family: Metric) -> None:
    assert re.fullmatch(r"gpuyard_[a-z]+(_[a-z]+)*", family.name)
    assert family.documentation.endswith(".")
    assert family.samples
    if family.type == "histogram":
        assert family.name.endswith("_seconds")
    elif family.type == "gauge":
        assert not family.name.endswith(("_total", "_count", "_sum", "_bucket", "_mb", "_percent"))
    else:
        assert family.type == "counter"
        assert all(sample.name == f"{family.name}_total" for sample in family.samples)


@pytest.fixture(scope="module")
def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text())


def expressions(dashboard: Any) -> list[str]:
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return shown + [variable["query"]["query"] for variable in dashboard["templating"]["list"]]


def test_the_dashboard_queries_only_existing_metrics(dashboard: Any) -> None:
    known = {sample.name: set(sample.labels) for sample in samples_of(ALL)}
    for expression in expressions(dashboard):
        asked = re.findall(r"(gpuyard_\w+)(?:\{([^}]*)\})?", expression)
        assert asked, expression
        for name, selected in asked:
            assert name in known, expression
            assert set(re.findall(r"(\w+)[!=]", selected)) <= known[name] | {"instance"}, expression


@pytest.mark.parametrize(
    "shown",
    [
        *(f"gpuyard_device_memory_{whose}_bytes" for whose in ("own", "others", "foreign", "free")),
        "gpuyard_device_utilization_ratio", "gpuyard_device_power_watts", "gpuyard_jobs", "gpuyard_wait_seconds_bucket",
        "gpuyard_starts_total", "gpuyard_attempts_ended_total", "gpuyard_out_of_memory_total",
        "gpuyard_out_of_memory_avoided_total", "gpuyard_step_seconds_bucket",
    ],
)  # fmt: skip
def test_the_dashboard_shows(shown: str, dashboard: Any) -> None:
    assert any(re.search(rf"\b{shown}\b", expression) for expression in expressions(dashboard))


def test_the_dashboard_names_existing_states_no_data_source_and_separate_panels(dashboard: Any) -> None:
    named = [state for text in expressions(dashboard) for states in re.findall(r'state!?=~?"([^"]+)"', text)
             for state in states.split("|")]  # fmt: skip
    assert named
    assert set(named) <= {str(state) for state in JobState}
    assert [each["name"] for each in dashboard["__inputs"]] == ["DS_PROMETHEUS"]
    sources = set(re.findall(r'"uid": "([^"]*)"', DASHBOARD.read_text()))
    assert sources == {"${DS_PROMETHEUS}", dashboard["uid"]}
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for at in (panel["gridPos"] for panel in panels):
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
