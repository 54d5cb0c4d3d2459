"""The Slurm commands for given terms, and the parsers of their output."""

import subprocess

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
        "ArrayJobID": "17",
        "ArrayTaskID": "3",
        "State": "RUNNING",
        "NodeList": "n0",
        "Comment": "gpuyard:t1",
        **cells,
    }
    assert values.keys() <= widths.keys()
    return b"".join(values.get(name, "").encode()[:width].ljust(width) for name, width in widths.items()) + b"\n"


def only(text: bytes) -> SlurmJobRow:
    (row,) = commands.parse_listing(text)
    return row


class TestNodes:
    def test_nodes_that_could_not_start_jobs_are_left_out(self) -> None:
        left_out = msgspec.structs.replace(submission(terms()), without=("n1", "n[4-5]"))
        assert "--exclude=n1,n[4-5]" in commands.submit_command(left_out, SlurmConfig())

    def test_each_node_is_listed_once_with_its_trouble(self) -> None:
        rows = [
            ("n0", "idle", "gpu:a100:2"),
            ("n0", "idle", "gpu:a100:2"),
            ("n1", "down*", "(null)"),
            ("n2", "mixed-", ""),
        ]
        text = "".join(f"{name:128}{state:64}{gres:1024}\n" for name, state, gres in rows)
        found = commands.parse_states(text)
        assert [(each.name, each.has_gpus, bool(each.trouble)) for each in found] == [
            ("n0", True, False), ("n1", False, True), ("n2", False, False),
        ]  # fmt: skip
        assert found[1].trouble == "Slurm says that it is down*: `scontrol show node n1` says why"

    def test_a_check_runs_on_one_node_with_a_gpu_if_it_has_one(self) -> None:
        node = ClusterNode(name="n0", place="n0", has_gpus=True)
        command = commands.run_command(node, "true", SlurmConfig(partition="fast"), 39.5)
        assert {"--nodelist=n0", "--gres=gpu:1", "--partition=fast", "--immediate=40"} <= set(command)
        assert command[-3:] == ["sh", "-c", "true"]


class TestSubmitting:
    def test_a_single_element_is_not_an_array(self) -> None:
        assert submitted() == [
            "sbatch",
            "--parsable",
            "--no-requeue",
            "--export=ALL",
            "--nodes=1",
            "--job-name=train",
            "--chdir=/shared/submissions/t1",
            "--output=/shared/submissions/t1/0.out",
            "--comment=gpuyard:t1",
        ]

    @pytest.mark.parametrize(("limit_s", "seconds"), [(None, 90), (600.0, 90), (590.0, 100)])
    def test_the_supervisor_gets_the_signal_before_the_users_own_limit(
        self, limit_s: float | None, seconds: int
    ) -> None:
        command = submitted(limit_s=limit_s, warning=parse_warning("USR1@90s"))
        assert starting(command, "--signal") == [f"--signal=B:USR1@{seconds}"]

    def test_a_comment_among_the_users_options_does_not_replace_ours(self) -> None:
        settings = SlurmConfig(options=("--comment=site",))
        comments = starting(submitted(settings=settings, options=("--comment=mine",)), "--comment")
        assert comments[-1] == "--comment=gpuyard:t1"

    def test_several_elements_are_an_array_with_one_output_file_each(self) -> None:
        command = submitted(12)
        assert "--array=0-11" in command
        assert "--output=/shared/submissions/t1/%a.out" in command

    def test_an_array_can_limit_how_many_run_at_once(self) -> None:
        assert "--array=0-11%4" in submitted(12, at_most=4)

    def test_every_field_of_the_terms_becomes_an_option(self) -> None:
        settings = SlurmConfig(
            partition="gpu", account="lab", qos="long", options=("--constraint=fast", "-v"), nice_base=100
        )
        command = submitted(
            settings=settings,
            need=Need(devices=2, model="a100"),
            ram_mb=1024.5,
            cpus=4,
            limit_s=61.0,
            expected_s=7200.0,
            priority=30,
            options=("--reservation=mine",),
        )
        assert command[8:] == [
            "--gres=gpu:a100:2",
            "--mem=1025M",
            "--cpus-per-task=4",
            "--time=2",
            "--nice=70",
            "--partition=gpu",
            "--account=lab",
            "--qos=long",
            "--constraint=fast",
            "-v",
            "--reservation=mine",
            "--comment=gpuyard:t1",
        ]

    @pytest.mark.parametrize(
        ("asked", "minutes"),
        [(terms(limit_s=0.5), 1), (terms(limit_s=60.0), 1), (terms(limit_s=60.1), 2), (terms(expected_s=7200.0), 120)],
    )
    def test_the_time_limit_is_in_whole_minutes_and_at_least_one(self, asked: ClusterTerms, minutes: int) -> None:
        assert f"--time={minutes}" in commands.submit_command(submission(asked), SlurmConfig())

    def test_without_a_limit_and_history_the_default_of_the_site_applies(self) -> None:
        assert starting(submitted(), "--time") == []

    def test_zero_memory_is_never_requested_because_slurm_takes_it_for_all(self) -> None:
        assert starting(submitted(ram_mb=0.0, cpus=0), "--mem") == []

    @pytest.mark.parametrize(
        ("base", "priority", "nice"), [(0, 5, None), (100, 100, None), (100, 500, None), (0, -3, 3)]
    )
    def test_nice_is_never_below_what_a_user_may_set(self, base: int, priority: int, nice: int | None) -> None:
        command = submitted(settings=SlurmConfig(nice_base=base), priority=priority)
        assert starting(command, "--nice") == ([] if nice is None else [f"--nice={nice}"])

    def test_a_folder_may_have_a_percent_sign_in_its_name(self) -> None:
        command = commands.submit_command(submission(terms(), 2, "/shared/100%a"), SlurmConfig())
        assert "--output=/shared/100%%a/%a.out" in command
        assert "--chdir=/shared/100%a" in command

    @pytest.mark.parametrize(
        ("name", "shown"),
        [
            ("a|b 'c' \"d\" %j", "a|b 'c' \"d\" %j"),
            ("two\nlines\x00\x1f", "two lines"),
            ("", "gpuyard"),
            ("n" * 5000, "n" * 200),
        ],
    )
    def test_any_name_is_changed_to_a_name_that_slurm_accepts(self, name: str, shown: str) -> None:
        assert starting(submitted(name=name), "--job-name") == [f"--job-name={shown}"]

    def test_the_script_runs_the_supervisor_with_the_elements_number(self) -> None:
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
    def test_the_job_id_is_read_from_the_output_of_sbatch(self, text: str, job: str | None) -> None:
        assert commands.parse_submission(text) == job


class TestGpus:
    def test_no_gpu_is_requested_if_none_is_needed(self) -> None:
        assert starting(submitted(), "--gres") == []

    @pytest.mark.parametrize(
        ("need", "gres"),
        [
            (SHARED, "shard:5"),
            (Need(memory=FixedMemory(0.0)), "shard:1"),
            (Need(memory=PartOfDevice(0.5)), "shard:12"),
            (Need(memory=FixedMemory(100.0), model="a100"), "shard:a100:1"),
            (Need(), "gpu:1"),
            (Need(memory=FixedMemory(24000.0)), "gpu:1"),
            (Need(memory=UncertainMemory(5000.0, 3000.0, 2000.0)), "gpu:1"),
            (Need(memory=WholeDevice(5000.0)), "gpu:1"),
            (Need(devices=2, memory=FixedMemory(5000.0)), "gpu:2"),
        ],
    )
    def test_a_job_that_shares_its_gpu_requests_shards(self, need: Need, gres: str) -> None:
        assert starting(submitted(settings=SHARDS, need=need), "--gres") == [f"--gres={gres}"]

    def test_without_shards_it_requests_a_whole_gpu(self) -> None:
        assert starting(submitted(need=SHARED), "--gres") == ["--gres=gpu:1"]

    def test_a_share_of_a_card_of_unknown_size_is_a_whole_gpu(self) -> None:
        need = Need(memory=PartOfDevice(0.5))
        assert starting(submitted(settings=SlurmConfig(shard_mb=1.0), need=need), "--gres") == ["--gres=gpu:1"]


class TestListing:
    def test_one_call_lists_all_jobs_of_the_user(self) -> None:
        command = commands.list_command(1000)
        assert command[:5] == ["squeue", "--noheader", "--array", "--states=all", "--user=1000"]

    def test_a_running_element(self) -> None:
        row = only(listed(StartTime="1700000000", EndTime="1800000000", Reason="None", exit_code="0"))
        assert row == SlurmJobRow(
            job="17",
            number=3,
            token="t1",
            sighting=Sighting(id="17_3", at=SiteState.RUNNING, place="n0", started_at=1700000000.0),
        )

    def test_a_pending_element_has_not_started_though_slurm_prints_an_expected_start(self) -> None:
        row = only(listed(State="PENDING", NodeList="", StartTime="1800000000", EndTime="NONE", Reason="Resources"))
        assert row.sighting == Sighting(id="17_3", at=SiteState.PENDING, reason="Resources: what it asks for is in use")

    def test_an_ended_element(self) -> None:
        row = only(
            listed(
                State="FAILED", StartTime="1700000000", EndTime="1700000009", exit_code="768", Reason="NonZeroExitCode"
            )
        )
        assert row.sighting == Sighting(
            id="17_3", at=SiteState.FAILED, place="n0", started_at=1700000000.0, ended_at=1700000010.0, status=3
        )

    def test_an_element_cancelled_while_pending_never_started(self) -> None:
        row = only(listed(State="CANCELLED", NodeList="", StartTime="1700000000", EndTime="1700000000", exit_code="0"))
        assert row.sighting == Sighting(id="17_3", at=SiteState.CANCELLED, ended_at=1700000001.0)

    def test_a_job_that_is_not_an_array_has_no_index(self) -> None:
        row = only(listed(ArrayTaskID="N/A"))
        assert (row.job, row.number, row.sighting.id) == ("17", None, "17")

    def test_jobs_of_other_origin_have_no_token(self) -> None:
        assert [row.token for row in commands.parse_listing(listed(Comment="(null)") + listed(Comment="mine"))] == [
            None,
            None,
        ]

    def test_any_text_in_the_fields_of_other_jobs_is_tolerated(self) -> None:
        strange = (
            listed(Comment="two\nlines") + "\n| é x \x1f\n".encode() + b"\xff\xfe" + b"\n" + listed(Comment="é" * 200)
        )
        rows = commands.parse_listing(strange + listed(Reason="é" * 300))
        assert [row.token for row in rows][-1] == "t1"
        assert {row.job for row in rows} == {"17"}

    def test_a_long_state_is_not_truncated(self) -> None:
        assert only(listed(State="OUT_OF_MEMORY")).sighting.at is SiteState.OUT_OF_MEMORY

    def test_a_job_that_never_had_a_node_has_no_status(self) -> None:
        assert only(listed(State="FAILED", NodeList="", exit_code="1", Reason="BadConstraints")).sighting.status is None


class TestAccounts:
    def test_one_call_queries_all_jobs(self) -> None:
        command = commands.accounting_command({"9", "17"})
        assert command[0] == "sacct"
        assert command[-1] == "--jobs=17,9"

    def test_an_ended_job_is_reported(self) -> None:
        text = (
            "17_3|COMPLETED|0:0|1700000000|1700000009|n0\n"
            "17_4|CANCELLED by 1000|0:15|1700000000|1700000005|n1\n"
            "18|CANCELLED by 0|0:0|None|1700000005|None assigned\n"
            "19|TIMEOUT|0:0|1700000000|1700000005|n1\n"
        )
        assert [(row.job, row.number, row.sighting) for row in commands.parse_accounting(text)] == [
            (
                "17",
                3,
                Sighting(
                    id="17_3", at=SiteState.SUCCEEDED, place="n0", started_at=1.7e9, ended_at=1.7e9 + 10, status=0
                ),
            ),
            (
                "17",
                4,
                Sighting(
                    id="17_4", at=SiteState.CANCELLED, place="n1", started_at=1.7e9, ended_at=1.7e9 + 6, status=143
                ),
            ),
            ("18", None, Sighting(id="18", at=SiteState.CANCELLED, ended_at=1.7e9 + 6)),
            (
                "19",
                None,
                Sighting(id="19", at=SiteState.TIMED_OUT, place="n1", started_at=1.7e9, ended_at=1.7e9 + 6, status=0),
            ),
        ]

    def test_jobs_that_accounting_lists_as_running_or_pending_are_ignored(self) -> None:
        text = "17_3|RUNNING|0:0|1700000000|Unknown|n0\n17_[4-9]|PENDING|0:0|Unknown|Unknown|None assigned\n"
        assert commands.parse_accounting(text) == []

    def test_malformed_lines_are_skipped(self) -> None:
        assert commands.parse_accounting("what?\n17_x|COMPLETED|0:0|1|2|n0\n\n|||||\n") == []


class TestCancelling:
    @pytest.mark.parametrize(
        ("ids", "arguments"),
        [
            (["17"], ["17"]),
            (["17_3"], ["17_[3]"]),
            (["17_0", "17_2", "17_1", "17_7", "17_1"], ["17_[0-2,7]"]),
            (["17_0", "9", "18_5", "17_1"], ["9", "17_[0-1]", "18_[5]"]),
        ],
    )
    def test_the_elements_of_an_array_are_one_argument(self, ids: list[str], arguments: list[str]) -> None:
        assert list(commands.cancel_commands(ids)) == [["scancel", "--quiet", *arguments]]

    def test_many_jobs_are_cancelled_in_several_calls(self) -> None:
        calls = list(commands.cancel_commands([str(number) for number in range(1200)]))
        assert [len(call) - 2 for call in calls] == [500, 500, 200]


class TestLimits:
    @pytest.mark.parametrize(
        ("text", "limits"),
        [
            (
                "MaxArraySize            = 2001\nMinJobAge               = 300 sec\n",
                SlurmLimits(most_in_array=2001, listed_for_s=300.0),
            ),
            ("MaxArraySize = 0\n", SlurmLimits(most_in_array=1)),
            (
                "MaxArraySize = 2001\nSchedulerParameters     = bf_interval=1,max_array_tasks=50\n",
                SlurmLimits(most_in_array=50),
            ),
            ("what?", SlurmLimits(most_in_array=1000)),
        ],
    )
    def test_the_limits_are_read_from_the_configuration(self, text: str, limits: SlurmLimits) -> None:
        assert commands.configuration_command()[0] == "scontrol"
        assert commands.parse_configuration(text) == limits


def test_slurm_variables_of_the_job_in_which_the_daemon_runs_are_removed() -> None:
    own = {
        "PATH": "/bin",
        "SLURM_CONF": "/etc/slurm.conf",
        "SBATCH_ACCOUNT": "lab",
        "SLURM_JOB_ID": "7",
        "SLURM_MEM_PER_NODE": "100",
        "SBATCH_ARRAY_INX": "0-9",
        "SQUEUE_STATES": "PENDING",
        "LC_ALL": "de_DE.UTF-8",
        "SECRET": "x",
    }
    kept = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "lab", "LC_ALL": "C"}
    assert commands.environment(own) == kept
