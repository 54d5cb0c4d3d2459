"""Submissions that no node of their cluster can take are refused; a cluster that does not answer refuses nothing."""

import pytest

from gpuyard.config import SlurmConfig
from gpuyard.engines.cluster import slurm_commands as commands
from gpuyard.engines.cluster.in_flight import split_launches
from gpuyard.engines.cluster.site import SiteRefused, SiteUnreachable
from gpuyard.engines.cluster.site_checks import SubmissionCheck
from gpuyard.errors import UserError
from gpuyard.model.cluster_terms import Amount, Basis, ClusterTerms, impossible
from gpuyard.model.job_spec import JobSpec
from gpuyard.model.lease import FixedMemory, Need
from gpuyard.ports import Launch

LISTED = "".join(
    f"{cpus:16}{memory:16}{gres}\n"
    for cpus, memory, gres in (
        ("8", "10000", "gpu:fake:2(S:0,1),shard:48"),
        ("64", "512000", "gpu:a100:4,gpu:2"),
        ("4", "8000", "(null)"),
    )
)


class FakeSite:
    def __init__(self) -> None:
        self.asked: list[ClusterTerms] = []
        self.fault: Exception | None = None

    def check(self, terms: ClusterTerms) -> None:
        self.asked.append(terms)
        if self.fault is not None:
            raise self.fault


def spec(gpus: int = 1, name: str = "x") -> JobSpec:
    return JobSpec(command=("true",), cwd="/", environment={}, need=Need(devices=gpus), name=name, engine="slurm")


def test_a_site_is_asked_once_for_jobs_that_need_the_same_and_if_silent_not_for_a_while() -> None:
    site = FakeSite()
    check = SubmissionCheck(lambda _: site)
    for job in (spec(), spec(name="y"), spec(gpus=2)):
        check.check(job)
    assert [terms.need.devices for terms in site.asked] == [1, 2]
    site = FakeSite()
    check = SubmissionCheck(lambda _: site)
    site.fault = SiteUnreachable("no answer")
    check.check(spec())
    check.check(spec(gpus=8))
    assert len(site.asked) == 1
    SubmissionCheck(lambda _: None).check(spec(gpus=800))


def test_a_refusal_is_impossible_and_asked_again() -> None:
    site = FakeSite()
    check = SubmissionCheck(lambda _: site)
    site.fault = SiteRefused("no node has it", hint="ask for less")
    for _ in range(2):
        with pytest.raises(UserError, match="no node has it") as refused:
            check.check(spec())
        assert (refused.value.code, refused.value.hint) == ("impossible", "ask for less")
    assert len(site.asked) == 2


def test_the_nodes_of_slurm_are_read_with_their_gpus_of_a_model() -> None:
    nodes = commands.parse_nodes(LISTED, None)
    assert {(each.gpus, each.cpus, each.ram_mb) for each in nodes} == {
        (2.0, 8.0, 10000.0), (6.0, 64.0, 512000.0), (0.0, 4.0, 8000.0),
    }  # fmt: skip
    assert {each.gpus for each in commands.parse_nodes(LISTED, "a100")} == {0.0, 4.0}


@pytest.mark.parametrize(
    ("options", "partition"),
    [((), "gpu"), (("--partition=big",), "big"), (("--qos=a", "-p big"), "big"), (("-pbig",), "big")],
)
def test_only_the_nodes_of_the_jobs_partition_count(options: tuple[str, ...], partition: str) -> None:
    terms = ClusterTerms(need=Need(), name="", options=options)
    assert commands.nodes_command(terms, SlurmConfig(partition="gpu"))[-1] == f"--partition={partition}"


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (Amount(gpus=2.0, cpus=8.0), None),
        (Amount(gpus=8.0), "no node of slurm has 8 GPUs; the largest has 6"),
        (Amount(gpus=1.0, cpus=65.0), "no node of slurm has 65 CPUs; the largest has 64"),
        (Amount(ram_mb=614400.0), "no node of slurm has 600 GB of RAM; the largest has 500 GB"),
    ],
)
def test_a_need_is_compared_with_the_largest_node(wanted: Amount, why: str | None) -> None:
    assert impossible("slurm", commands.parse_nodes(LISTED, None), wanted) == why
    assert impossible("slurm", (), wanted) is None


def launch(job_id: int, **fields: object) -> Launch:
    terms = ClusterTerms(**{"need": Need(devices=0), "name": "x", **fields})  # type: ignore[arg-type]
    return Launch(job_id=job_id, attempt=1, command=("true",), cwd="/", environment={}, engine="slurm", terms=terms)


def learned(job_id: int, ram_mb: float | None, seconds: float | None, memory_mb: float) -> Launch:
    basis = Basis.DEFAULT if ram_mb is None else Basis.LEARNED
    return launch(
        job_id, need=Need(memory=FixedMemory(memory_mb)), memory_basis=Basis.LEARNED, ram_mb=ram_mb, ram_basis=basis,
        expected_s=seconds, time_basis=Basis.LEARNED,
    )  # fmt: skip


def test_jobs_that_differ_in_learned_amounts_are_one_submission_on_the_most_of_each() -> None:
    batch, rest = split_launches([learned(1, 512.0, 900.0, 2048.0), learned(2, 1024.0, 1800.0, 1024.0)], 10)
    assert ([each.job_id for each in batch], rest) == ([1, 2], [])
    [terms] = {each.terms for each in batch}
    assert terms is not None
    assert (terms.ram_mb, terms.expected_s, terms.need.required_mb) == (1024.0, 1800.0, 2048.0)
    batch, _ = split_launches([learned(1, 512.0, 900.0, 2048.0), learned(2, None, None, 1024.0)], 10)
    [terms] = {each.terms for each in batch}
    assert terms is not None
    assert (terms.ram_mb, terms.ram_basis, terms.expected_s) == (None, Basis.DEFAULT, None)


def test_declared_amounts_and_amounts_for_a_site_that_counts_are_kept_apart() -> None:
    batch, rest = split_launches([launch(1, ram_mb=512.0), launch(2, ram_mb=1024.0), launch(3, ram_mb=512.0)], 10)
    assert ([each.job_id for each in batch], [each.job_id for each in rest]) == ([1, 3], [2])
    batch, rest = split_launches(
        [learned(1, 512.0, 900.0, 2048.0), learned(2, 1024.0, 900.0, 2048.0)], 10, merges_learned=False
    )
    assert ([each.job_id for each in batch], [each.job_id for each in rest]) == ([1], [2])
