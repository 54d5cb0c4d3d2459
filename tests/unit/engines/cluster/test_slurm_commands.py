"""The Slurm commands for given terms, and the parsers of their output."""

import subprocess
from typing import Any

import msgspec
import pytest

from gpuyard.config import SlurmConfig
from gpuyard.engines.cluster import slurm_commands as commands
from gpuyard.engines.cluster.site import ClusterNode, ClusterSubmission, Sighting, SiteState
from gpuyard.engines.cluster.slurm_commands import SlurmJobRow, SlurmLimits
from gpuyard.model.cluster_terms import ClusterTerms
from gpuyard.model.lease import FixedMemory, Need, PartOfDevice, UncertainMemory, WholeDevice
from gpuyard.model.stopping import parse_warning

SHARED = Need(memory=FixedMemory(5000.0))
SHARDS = SlurmConfig(shard_mb=1024.0, gpu_memory="24000M")


def terms(**fields: object) -> ClusterTerms:
    return ClusterTerms(**{"need": Need(devices=0), "name": "train", **fields})  # type: ignore[arg-type]


def submission(asked: ClusterTerms, count: int = 1, folder: str = "/shared/submissions/t1") -> ClusterSubmission:
    return ClusterSubmission(token="t1", terms=asked, count=count, folder=folder, supervisor=("python3", "x"))


def submitted(count: int = 1, settings: SlurmConfig | None = None, **fields: object) -> list[str]:
    return commands.submit_command(submission(terms(**fields), count), settings or SlurmConfig())


def starting(command: list[str], option: str) -> list[str]:
    return [argument for argument in command if argument.startswith(option)]


def listed(**cells: str) -> bytes:
    """Return a line as squeue prints it for the requested columns."""
    asked = commands.list_command(0)[-1].removeprefix("--Format=").split(",")
    widths = {name: int(width) for name, width in (column.split(":") for column in asked)}
    values = {
        "ArrayJobID": "17", "ArrayTaskID": "3", "State": "RUNNING", "NodeList": "n0", "Comment": "gpuyard:t1",
        **cells,
    }  # fmt: skip
    assert values.keys() <= widths.keys()
    return b"".join(values.get(name, "").encode()[:width].ljust(width) for name, width in widths.items()) + b"\n"


def only(text: bytes) -> SlurmJobRow:
    (row,) = commands.parse_listing(text)
    return row


def test_nodes_that_could_not_start_jobs_are_left_out() -> None:
    left_out = msgspec.structs.replace(submission(terms()), without=("n1", "n[4-5]"))
    assert "--exclude=n1,n[4-5]" in commands.submit_command(left_out, SlurmConfig())


def test_each_node_is_listed_once_with_its_trouble() -> None:
    free = ("n0", "idle", "gpu:a100:2")
    rows = [free, free, ("n1", "down*", "(null)"), ("n2", "mixed-", "")]
    found = commands.parse_states("".join(f"{name:128}{state:64}{gres:1024}\n" for name, state, gres in rows))
    assert [(each.name, each.has_gpus, bool(each.trouble)) for each in found] == [
        ("n0", True, False), ("n1", False, True), ("n2", False, False),
    ]  # fmt: skip
    assert found[1].trouble == "Slurm says that it is down*: `scontrol show node n1` says why"


def test_a_check_runs_on_one_node_with_a_gpu_if_it_has_one() -> None:
    node = ClusterNode(name="n0", place="n0", has_gpus=True)
    command = commands.run_command(node, "true", SlurmConfig(partition="fast"), 39.5)
    assert {"--nodelist=n0", "--gres=gpu:1", "--partition=fast", "--immediate=40"} <= set(command)
    assert command[-3:] == ["sh", "-c", "true"]


def test_a_single_element_is_not_an_array_and_asks_for_nothing_that_was_not_said() -> None:
    assert submitted() == [
        "sbatch", "--parsable", "--no-requeue", "--export=ALL", "--nodes=1", "--job-name=train",
        "--chdir=/shared/submissions/t1", "--output=/shared/submissions/t1/0.out", "--comment=gpuyard:t1",
    ]  # fmt: skip


@pytest.mark.parametrize(("limit_s", "seconds"), [(None, 90), (600.0, 90), (590.0, 100)])
def test_the_supervisor_gets_the_signal_before_the_users_own_limit(limit_s: float | None, seconds: int) -> None:
    command = submitted(limit_s=limit_s, warning=parse_warning("USR1@90s"))
    assert starting(command, "--signal") == [f"--signal=B:USR1@{seconds}"]


def test_several_elements_are_an_array_with_one_output_file_each() -> None:
    command = submitted(12)
    assert "--array=0-11" in command
    assert "--output=/shared/submissions/t1/%a.out" in command
    assert "--array=0-11%4" in submitted(12, at_most=4), "as many at once"
    odd = commands.submit_command(submission(terms(), 2, "/shared/100%a"), SlurmConfig())
    assert {"--output=/shared/100%%a/%a.out", "--chdir=/shared/100%a"} <= set(odd)


def test_every_field_of_the_terms_becomes_an_option() -> None:
    site_options = ("--constraint=fast", "-v", "--comment=site")
    settings = SlurmConfig(partition="gpu", account="lab", qos="long", options=site_options, nice_base=100)
    command = submitted(
        settings=settings, need=Need(devices=2, model="a100"), ram_mb=1024.5, cpus=4, limit_s=61.0, expected_s=7200.0,
        priority=30, options=("--reservation=mine", "--comment=mine"),
    )  # fmt: skip
    assert command[8:] == [
        "--gres=gpu:a100:2", "--mem=1025M", "--cpus-per-task=4", "--time=2", "--nice=70", "--partition=gpu",
        "--account=lab", "--qos=long", "--constraint=fast", "-v", "--comment=site", "--reservation=mine",
        "--comment=mine", "--comment=gpuyard:t1",
    ], "the last comment counts"  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "option", "given"),
    [
        pytest.param({"limit_s": 0.5}, "--time", ["--time=1"], id="whole minutes, at least one"),
        pytest.param({"limit_s": 60.0}, "--time", ["--time=1"], id="one minute"),
        pytest.param({"limit_s": 60.1}, "--time", ["--time=2"], id="more than one minute"),
        pytest.param({"expected_s": 7200.0}, "--time", ["--time=120"], id="learned"),
        pytest.param({"ram_mb": 0.0, "cpus": 0}, "--mem", [], id="Slurm takes zero memory for all"),
        pytest.param({}, "--gres", [], id="no GPU is needed"),
        pytest.param({"need": SHARED}, "--gres", ["--gres=gpu:1"], id="without shards a whole GPU"),
        pytest.param({"name": "a|b 'c' \"d\" %j"}, "--job-name", ["--job-name=a|b 'c' \"d\" %j"], id="any name"),
        pytest.param({"name": "two\nlines\x00\x1f"}, "--job-name", ["--job-name=two lines"], id="a name of lines"),
        pytest.param({"name": ""}, "--job-name", ["--job-name=gpuyard"], id="no name"),
        pytest.param({"name": "n" * 5000}, "--job-name", [f"--job-name={'n' * 200}"], id="a long name"),
    ],
)
def test_terms_are_given_as_slurm_takes_them(fields: dict[str, Any], option: str, given: list[str]) -> None:
    assert starting(submitted(**fields), option) == given


@pytest.mark.parametrize(("base", "priority", "nice"), [(0, 5, None), (100, 100, None), (100, 500, None), (0, -3, 3)])
def test_nice_is_never_below_what_a_user_may_set(base: int, priority: int, nice: int | None) -> None:
    command = submitted(settings=SlurmConfig(nice_base=base), priority=priority)
    assert starting(command, "--nice") == ([] if nice is None else [f"--nice={nice}"])


def test_the_script_runs_the_supervisor_with_the_elements_number() -> None:
    command = ("printf", "%s|", "it's", 'a "b" $HOME `x`', "two\nlines", "#SBATCH --hold", "")
    text = commands.script(ClusterSubmission(token="t", terms=terms(), count=9, folder="/f", supervisor=command))
    for environment, number in ({}, "0"), ({"SLURM_ARRAY_TASK_ID": "7"}, "7"):
        ran = subprocess.run(["/bin/sh"], input=text, env=environment, capture_output=True, text=True, check=True)
        assert ran.stdout.split("|")[:-1] == [*command[2:], number]
    assert text.startswith("#!/bin/sh\nexec ")


@pytest.mark.parametrize(
    ("text", "job"),
    [("17\n", "17"), ("17;cluster\n", "17"), ("Welcome to 2 clusters!\n17\n", "17"), ("", None), ("no", None)],
)
def test_the_job_id_is_read_from_the_output_of_sbatch(text: str, job: str | None) -> None:
    assert commands.parse_submission(text) == job


@pytest.mark.parametrize(
    ("need", "gres"),
    [
        (SHARED, "shard:5"), (Need(memory=FixedMemory(0.0)), "shard:1"),
        (Need(memory=PartOfDevice(0.5)), "shard:12"),
        (Need(memory=FixedMemory(100.0), model="a100"), "shard:a100:1"), (Need(), "gpu:1"),
        (Need(memory=FixedMemory(24000.0)), "gpu:1"),
        (Need(memory=UncertainMemory(5000.0, 3000.0, 2000.0)), "gpu:1"),
        (Need(memory=WholeDevice(5000.0)), "gpu:1"), (Need(devices=2, memory=FixedMemory(5000.0)), "gpu:2"),
    ],
)  # fmt: skip
def test_a_job_that_shares_its_gpu_requests_shards(need: Need, gres: str) -> None:
    assert starting(submitted(settings=SHARDS, need=need), "--gres") == [f"--gres={gres}"]


def test_a_share_of_a_card_of_unknown_size_is_a_whole_gpu() -> None:
    need = Need(memory=PartOfDevice(0.5))
    assert starting(submitted(settings=SlurmConfig(shard_mb=1.0), need=need), "--gres") == ["--gres=gpu:1"]


RUNS = Sighting(id="17_3", at=SiteState.RUNNING, place="n0", started_at=1700000000.0)
NO_NODE = {"NodeList": "", "StartTime": "1800000000", "EndTime": "NONE"}
ENDED = {"StartTime": "1700000000", "EndTime": "1700000009"}


@pytest.mark.parametrize(
    ("cells", "sighting"),
    [
        pytest.param({**ENDED, "Reason": "None", "exit_code": "0"}, RUNS, id="running"),
        pytest.param(
            {**NO_NODE, "State": "PENDING", "Reason": "Resources"},
            Sighting(id="17_3", at=SiteState.PENDING, reason="Resources: what it asks for is in use"),
            id="pending, though Slurm prints an expected start",
        ),
        pytest.param(
            {**ENDED, "State": "FAILED", "exit_code": "768", "Reason": "NonZeroExitCode"},
            msgspec.structs.replace(RUNS, at=SiteState.FAILED, ended_at=1700000010.0, status=3),
            id="ended",
        ),
        pytest.param(
            {
                "State": "CANCELLED",
                "NodeList": "",
                "StartTime": "1700000000",
                "EndTime": "1700000000",
                "exit_code": "0",
            },
            Sighting(id="17_3", at=SiteState.CANCELLED, ended_at=1700000001.0),
            id="cancelled while pending",
        ),
    ],
)
def test_an_element_is_listed_with_its_state(cells: dict[str, str], sighting: Sighting) -> None:
    assert only(listed(**cells)) == SlurmJobRow(job="17", number=3, token="t1", sighting=sighting)


def test_one_call_lists_all_jobs_of_the_user_and_those_of_other_origin_have_no_token() -> None:
    command = commands.list_command(1000)
    assert command[:5] == ["squeue", "--noheader", "--array", "--states=all", "--user=1000"]
    others = commands.parse_listing(listed(Comment="(null)") + listed(Comment="mine"))
    assert [row.token for row in others] == [None, None]
    row = only(listed(ArrayTaskID="N/A"))
    assert (row.job, row.number, row.sighting.id) == ("17", None, "17"), "not an array"
    assert only(listed(State="OUT_OF_MEMORY")).sighting.at is SiteState.OUT_OF_MEMORY, "a long state"
    never = only(listed(State="FAILED", NodeList="", exit_code="1", Reason="BadConstraints"))
    assert never.sighting.status is None, "it never had a node"


def test_any_text_in_the_fields_of_other_jobs_is_tolerated() -> None:
    strange = listed(Comment="two\nlines") + "\n| é x \x1f\n".encode() + b"\xff\xfe\n" + listed(Comment="é" * 200)
    rows = commands.parse_listing(strange + listed(Reason="é" * 300))
    assert [row.token for row in rows][-1] == "t1"
    assert {row.job for row in rows} == {"17"}


def test_one_call_reports_all_ended_jobs() -> None:
    command = commands.accounting_command({"9", "17"})
    assert (command[0], command[-1]) == ("sacct", "--jobs=17,9")
    text = (
        "17_3|COMPLETED|0:0|1700000000|1700000009|n0\n"
        "17_4|CANCELLED by 1000|0:15|1700000000|1700000005|n1\n"
        "18|CANCELLED by 0|0:0|None|1700000005|None assigned\n"
        "19|TIMEOUT|0:0|1700000000|1700000005|n1\n"
        "17_5|RUNNING|0:0|1700000000|Unknown|n0\n17_[6-9]|PENDING|0:0|Unknown|Unknown|None assigned\n"
        "what?\n17_x|COMPLETED|0:0|1|2|n0\n\n|||||\n"
    )
    done = Sighting(id="17_3", at=SiteState.SUCCEEDED, place="n0", started_at=1.7e9, ended_at=1.7e9 + 10, status=0)
    on_n1 = msgspec.structs.replace(done, place="n1", ended_at=1.7e9 + 6)
    assert [(row.job, row.number, row.sighting) for row in commands.parse_accounting(text)] == [
        ("17", 3, done),
        ("17", 4, msgspec.structs.replace(on_n1, id="17_4", at=SiteState.CANCELLED, status=143)),
        ("18", None, Sighting(id="18", at=SiteState.CANCELLED, ended_at=1.7e9 + 6)),
        ("19", None, msgspec.structs.replace(on_n1, id="19", at=SiteState.TIMED_OUT)),
    ]


@pytest.mark.parametrize(
    ("ids", "arguments"),
    [
        (["17"], ["17"]),
        (["17_3"], ["17_[3]"]),
        (["17_0", "17_2", "17_1", "17_7", "17_1"], ["17_[0-2,7]"]),
        (["17_0", "9", "18_5", "17_1"], ["9", "17_[0-1]", "18_[5]"]),
    ],
)
def test_the_elements_of_an_array_are_one_argument(ids: list[str], arguments: list[str]) -> None:
    assert list(commands.cancel_commands(ids)) == [["scancel", "--quiet", *arguments]]


def test_many_jobs_are_cancelled_in_several_calls() -> None:
    calls = list(commands.cancel_commands([str(number) for number in range(1200)]))
    assert [len(call) - 2 for call in calls] == [500, 500, 200]


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("MaxArraySize = 2001\nMinJobAge    = 300 sec\n", SlurmLimits(most_in_array=2001, listed_for_s=300.0)),
        ("MaxArraySize = 0\n", SlurmLimits(most_in_array=1)),
        ("MaxArraySize = 2001\nSchedulerParameters = a=1,max_array_tasks=50\n", SlurmLimits(most_in_array=50)),
        ("what?", SlurmLimits(most_in_array=1000)),
    ],
)
def test_the_limits_are_read_from_the_configuration(text: str, limits: SlurmLimits) -> None:
    assert commands.configuration_command()[0] == "scontrol"
    assert commands.parse_configuration(text) == limits


def test_slurm_variables_of_the_job_in_which_the_daemon_runs_are_removed() -> None:
    kept = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "lab"}
    dropped = {"SLURM_JOB_ID": "7", "SLURM_MEM_PER_NODE": "100", "SBATCH_ARRAY_INX": "0-9", "SQUEUE_STATES": "PENDING"}
    own = {**kept, **dropped, "LC_ALL": "de_DE.UTF-8", "SECRET": "x"}
    assert commands.environment(own) == {**kept, "LC_ALL": "C"}
