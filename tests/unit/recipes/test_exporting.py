"""Jobs as scripts for Slurm and Ray."""

from collections.abc import Callable

import pytest

from gpuyard.config import RayConfig, SlurmConfig
from gpuyard.model.cluster_terms import ClusterTerms
from gpuyard.model.dependencies import DependencyKind
from gpuyard.model.exported_job import ExportedDependency, ExportedJob, NotExported
from gpuyard.model.lease import FixedMemory, Need
from gpuyard.model.lifecycle import JobState
from gpuyard.recipes.export_scripts import Script, ray_script, slurm_script

SHARED = Need(memory=FixedMemory(6000.0))


def packed(job_id: int, *argv: str, **other: object) -> ExportedJob:
    """Return a job; fields of the terms go to its terms, the others to the job."""
    other = {"state": JobState.QUEUED, **other}
    of_terms = {name: other.pop(name) for name in ClusterTerms.__struct_fields__ if name in other}
    terms = ClusterTerms(**{"need": Need(devices=0), "name": "train", **of_terms})  # type: ignore[arg-type]
    argv = argv or ("train",)
    return ExportedJob(id=job_id, argv=argv, cwd="/x", terms=terms, **other)  # type: ignore[arg-type]


def array(first: int, count: int, *, at: int = 0, **other: object) -> list[ExportedJob]:
    """Return the jobs of an array that runs `part N` for each index."""
    return [
        packed(first + n, "part", str(at + n), template=("part", "{index}"), index=at + n, group=first, **other)
        for n in range(count)
    ]


def sweep(first: int, count: int, **other: object) -> list[ExportedJob]:
    return [packed(first + n, "train", f"lr {n}", group=first, **other) for n in range(count)]


def after(*ids: int, kind: DependencyKind = DependencyKind.OK, is_met: bool = False) -> tuple[ExportedDependency, ...]:
    return tuple(ExportedDependency(job_id=each, kind=kind, is_met=is_met) for each in ids)


def slurm(*jobs: ExportedJob, tags: tuple[str, ...] = (), **settings: object) -> Script:
    return slurm_script(jobs, SlurmConfig(**settings), tags)  # type: ignore[arg-type]


def ray(*jobs: ExportedJob, tags: tuple[str, ...] = (), **settings: object) -> Script:
    return ray_script(jobs, RayConfig(**settings), tags)  # type: ignore[arg-type]


def submissions(script: Script) -> list[str]:
    """Return the submitting lines without their indentation."""
    return [line.strip() for line in script.text.splitlines() if line.strip().startswith(("submit ", "# submit "))]


def lines(script: Script) -> list[str]:
    return script.text.splitlines()


def not_exported(script: Script) -> dict[NotExported, str]:
    """Return the jobs affected by each thing that the script does not export."""
    return {
        what: note.removesuffix(f": {what.description}")
        for note in script.notes
        for what in NotExported
        if note.endswith(f": {what.description}")
    }


# Slurm


def test_an_array_keeps_its_indexes_and_limit_and_has_its_index_in_any_argument() -> None:
    script = slurm(*array(17, 4, at=3, at_most=2))
    (line,) = submissions(script)
    assert line.startswith("submit 17 --array=3-6%2 ")
    assert 'set -- part "$GPUYARD_ARRAY_INDEX"' in lines(script)
    assert 'export GPUYARD_ARRAY_INDEX="$SLURM_ARRAY_TASK_ID"' in lines(script)
    template = ("run", "a b{index}", "{index}{index}", "", "{other}")
    jobs = [packed(n, "run", template=template, index=n, group=1) for n in (1, 2)]
    index = '"$GPUYARD_ARRAY_INDEX"'
    assert f"set -- run 'a b'{index} {index}{index} '' '{{other}}'" in lines(slurm(*jobs))


def test_a_sweep_is_one_array_but_for_jobs_with_other_needs() -> None:
    script = slurm(*sweep(17, 3))
    assert len(submissions(script)) == 1
    assert "--array=0-2 " in submissions(script)[0]
    assert [line for line in lines(script) if ";;" in line] == [f"{n}) set -- train 'lr {n}' ;;" for n in range(3)]
    script = slurm(*sweep(17, 2), packed(19, "train", "big", group=17, ram_mb=9000.0))
    assert [line.split()[1] for line in submissions(script)] == ["17", "19"]
    assert "--mem=9000M" in submissions(script)[1]


def test_an_array_beyond_slurms_limit_is_split_and_its_own_limit_not_exported() -> None:
    many, high = slurm(*array(1, 2500)), slurm(*array(1, 3, at=999))
    assert [line.split()[2] for line in submissions(many)] == ["--array=0-999", "--array=0-999", "--array=0-499"]
    assert "0) export GPUYARD_ARRAY_INDEX=2000; set -- part 2000 ;;" in lines(many)
    assert "--array=0-2" in submissions(high)[0]
    assert NotExported.AT_ONCE not in not_exported(slurm(*array(1, 10, at_most=2)))
    assert not_exported(slurm(*array(1, 1500, at_most=2)))[NotExported.AT_ONCE] == "all jobs"


def test_dependencies_on_exported_jobs_become_slurm_dependencies() -> None:
    script = slurm(
        packed(1),
        packed(2),
        *array(3, 3),
        packed(6, after=after(1, 2) + after(3, 4, 5, kind=DependencyKind.ANY)),
        packed(7, after=after(4, kind=DependencyKind.FAILED)),
    )
    assert '"--dependency=afterok:$job_1:$job_2,afterany:$job_3"' in submissions(script)[3]
    assert '"--dependency=afternotok:${job_3}_1"' in submissions(script)[4]
    assert all("--kill-on-invalid-dep=yes" in line for line in submissions(script)[3:])
    waits = packed(2, after=after(1, is_met=True))
    assert "--dependency" not in slurm(waits).text
    assert "afterok:$job_1" in slurm(packed(1, state=JobState.SUCCEEDED), waits).text


def test_a_held_job_and_one_with_a_dependency_outside_the_script_are_held() -> None:
    script = slurm(packed(1), packed(5, after=after(3)))
    assert [line.endswith("--hold <<'END'") for line in submissions(script)] == [False, True]
    assert any(line.startswith("# It waits for 3, ") for line in lines(script))
    assert not_exported(script)[NotExported.OUTSIDE] == "job 5"
    assert "--hold" in submissions(slurm(packed(1, state=JobState.HELD)))[0]


def test_retries_become_requeues_after_a_failure_and_after_a_lost_node() -> None:
    script = slurm(packed(1, retries=2), packed(2))
    assert "--requeue --open-mode=append" in submissions(script)[0]
    assert "--no-requeue" in submissions(script)[1]
    assert '[ "${SLURM_RESTART_COUNT:-0}" -ge 2 ] || scontrol requeue "$SLURM_JOB_ID"' in lines(script)


def test_needs_are_requested_as_the_engine_does() -> None:
    job = packed(1, need=SHARED, ram_mb=2000.0, cpus=3, limit_s=3600.0, priority=2)
    script = slurm(job, partition="gpu", options=("--constraint=a100",), shard_mb=1000.0, nice_base=10)
    for word in (
        "--gres=shard:6",
        "--mem=2000M",
        "--cpus-per-task=3",
        "--time=60",
        "--nice=8",
        "--partition=gpu",
        "--constraint=a100",
        "--job-name=train",
    ):
        assert word in submissions(script)[0].split()
    assert not {NotExported.SHARE, NotExported.PRIORITY} & set(not_exported(script))


def test_the_script_has_the_input_and_folder_of_a_job_and_nothing_of_the_engine() -> None:
    text = slurm(packed(1)).text
    assert not any(word in text for word in ("--comment", "--output", "--chdir", "submission.json"))
    assert "--time" not in slurm(packed(1, expected_s=60.0)).text
    script = slurm(packed(1, stdin="/in put"), packed(2, folder="/out/0"))
    assert "exec \"$@\" < '/in put'" in lines(script)
    assert "mkdir -p -- /out/0 || exit" in lines(script)


def test_options_of_an_engine_are_exported_for_that_engine_only() -> None:
    mine, others = packed(1, options=("--qos=x",), engine="slurm"), packed(2, options=("--qos=y",), engine="ray")
    script = slurm(mine, others)
    assert "--qos=x" in script.text
    assert "--qos=y" not in script.text
    assert not_exported(script)[NotExported.OPTIONS] == "job 2"


def test_jobs_of_higher_priority_come_first_but_after_their_dependencies() -> None:
    script = slurm(packed(1), packed(2), packed(3, priority=5), packed(4, after=after(2), priority=9))
    assert [int(line.split()[1]) for line in submissions(script)] == [2, 4, 3, 1]


def test_an_argument_equal_to_the_heredoc_delimiter_does_not_end_it() -> None:
    text = slurm(packed(1, "echo", "a\nEND\nb")).text
    assert "<<'END1'" in text
    assert text.endswith("\nEND1\n")


# Notes, in both


@pytest.mark.parametrize("write", [slurm, ray])
def test_each_kind_of_loss_is_reported_once_and_noted_in_the_script(write: Callable[..., Script]) -> None:
    few = (NotExported.ENVIRONMENT, NotExported.GATES)
    jobs = [packed(n, stays=few if n in (3, 4, 5, 9) else few[:1], tag="night", priority=n == 9) for n in range(1, 11)]
    script = write(*jobs, tags=("night",))
    assert not_exported(script) == {
        NotExported.ENVIRONMENT: "all jobs",
        NotExported.GATES: "jobs 3-5 9",
        NotExported.TAGS: "all jobs",
        NotExported.PRIORITY: "job 9",
    }
    assert [line[4:] for line in lines(script) if line.startswith("# - ")] == list(script.notes)


def test_a_long_list_of_jobs_is_shortened() -> None:
    jobs = [packed(n, stays=(NotExported.GATES,) if n % 2 else ()) for n in range(1, 200)]
    assert not_exported(slurm(*jobs))[NotExported.GATES].endswith(" 41 and others")


def test_whole_gpus_in_place_of_shares_are_reported() -> None:
    job = packed(1, need=SHARED)
    assert NotExported.SHARE in not_exported(slurm(job))
    assert NotExported.SHARE in not_exported(ray(job))
    assert NotExported.SHARE not in not_exported(ray(job, gpu_memory="24000M"))
    assert NotExported.SHARE not in not_exported(slurm(packed(1, need=Need())))


# Ray


def test_ray_gets_each_job_by_itself_and_arrays_their_index() -> None:
    script = ray(*sweep(17, 2, need=SHARED, cpus=2, ram_mb=1.0), gpu_memory="24000M")
    asked = "--entrypoint-num-gpus=0.25 --entrypoint-num-cpus=2.0 --entrypoint-memory=1048576"
    assert submissions(script) == [f"submit {17 + n} {asked} -- sh 17.sh {n}" for n in range(2)]
    assert "1) set -- train 'lr 1' ;;" in lines(script)
    script = ray(*array(17, 2, at=5, at_most=1, cpus=2))
    asked = "--entrypoint-num-cpus=2.0"
    assert submissions(script) == [f"submit 17 {asked} -- sh 17.sh 5", f"submit 18 {asked} -- sh 17.sh 6"]
    assert 'export GPUYARD_ARRAY_INDEX="$1"' in lines(script)
    assert not_exported(script)[NotExported.AT_ONCE] == "all jobs"


def test_the_script_waits_for_all_dependencies_after_submitting_independent_jobs() -> None:
    script = ray(packed(1), packed(2, after=after(1)), packed(3))
    assert [line.split()[1] for line in submissions(script)] == ["1", "3", "2"]
    assert "if ended ok 1; then" in lines(script)
    assert "ended()" not in ray(packed(1)).text
    waits = after(1, 2) + after(3, kind=DependencyKind.ANY)
    assert "if ended ok 1 2 && ended any 3; then" in lines(ray(*map(packed, (1, 2, 3)), packed(4, after=waits)))


def test_held_jobs_and_their_dependants_are_commented_out() -> None:
    script = ray(packed(1, state=JobState.HELD), packed(2, after=after(1)), packed(3, after=after(99)), packed(4))
    assert [line.split()[1] for line in submissions(script) if not line.startswith("#")] == ["4"]
    assert [line for line in lines(script) if line.startswith(("# Held", "# Wait"))] == [
        "# Held:",
        "# Wait for 99, not submitted here:",
        "# Wait for 1, not submitted here:",
    ]
    assert (not_exported(script)[NotExported.HELD], not_exported(script)[NotExported.OUTSIDE]) == ("job 1", "job 3")


def test_limits_retries_resources_and_the_address_are_those_of_the_job_and_the_configuration() -> None:
    script = ray(packed(1, limit_s=90.0, grace_s=5.0, retries=2), packed(2, limit_s=60.0))
    assert '    timeout -k 5 90 "$@" && exit' in lines(script)
    assert "tries=3" in lines(script)
    assert 'exec timeout -k 10 60 "$@"' in lines(script)
    assert "|| RAY_API_SERVER_ADDRESS=http://head:8265" in ray(packed(1), address="head:8265").text
    assert "|| RAY_API_SERVER_ADDRESS=${RAY_ADDRESS:-http://127.0.0.1:8265}" in ray(packed(1)).text
    job = packed(1, need=Need(model="H100"), options=('--entrypoint-resources={"a b": 1}',), engine="ray")
    assert """'--entrypoint-resources={"accelerator_type:H100": 0.001, "a b": 1}'""" in submissions(ray(job))[0]
