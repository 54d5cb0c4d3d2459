"""Parsing policies: their names and options."""

import pytest

from gpuyard.errors import UserError
from gpuyard.model.lease import FixedMemory
from gpuyard.simulator.simulation import find_policy
from tests.unit.simulator.samples import trace_job


def test_a_policy_can_be_varied() -> None:
    policy = find_policy("gpuyard:load=120:quantile=0.95:jobs=3")
    assert policy.name == "gpuyard:load=120:quantile=0.95:jobs=3"
    assert policy.learns
    assert policy.rules.packing.sureness == pytest.approx(1.645, abs=0.001)
    assert policy.rules.packing.max_load_percent == 120.0
    assert policy.rules.packing.max_jobs_per_device == 3
    assert find_policy("gpuyard:load=none").rules.packing.max_load_percent is None
    assert policy.rules.shares_first_runs
    assert not find_policy("gpuyard:quantile=none").rules.shares_first_runs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lifo", "there is no policy 'lifo'"),
        ("gpuyard:colour=3", "'colour=3' is not an option of a policy"),
        ("gpuyard:load=much", "'load=much' needs a number of 0 or more"),
        ("gpuyard:jobs=-1", "'jobs=-1' needs a number of 0 or more"),
        ("gpuyard:quantile=1", "'quantile=1' is not a quantile"),
        ("gpuyard:load=1.2.3", "'load=1.2.3' needs a number of 0 or more"),
    ],
)
def test_unknown_policies_and_options_are_rejected(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_policy(text)


def test_without_a_declaration_a_job_gets_whole_gpus_and_declarations_are_capped() -> None:
    policy = find_policy("declared")
    assert policy.need_of(trace_job(), 24_576.0).is_exclusive
    shared = policy.need_of(trace_job(declared_mb=30_000.0), 24_576.0)
    assert shared.memory == FixedMemory(24_576.0)
