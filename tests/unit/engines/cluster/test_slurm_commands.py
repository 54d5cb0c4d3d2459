"""What is said to Slurm for which terms, and how whatever it prints is understood."""

import subprocess

import pytest

from gpuyard.core.cluster.offer import ClusterTerms
from gpuyard.core.lease import FixedMemory, Need, PartOfDevice, RestOfDevice, WholeDevice
from gpuyard.engines.cluster import slurm_commands as commands
from gpuyard.engines.cluster.site import ClusterSubmission, Sighting, SiteState
from gpuyard.engines.cluster.slurm_commands import SlurmJobRow, SlurmLimits, SlurmSettings

SHARED = Need(memory=FixedMemory(5000.0))
SHARDS = SlurmSettings(shard_mb=1024.0, card_mb=24000.0)


def terms(**said: object) -> ClusterTerms:
    return ClusterTerms(**{"need": Need(devices=0), "name": "train", **said})  # type: ignore[arg-type]


def submission(asked: ClusterTerms, count: int = 1, folder: str = "/shared/parcels/t1") -> ClusterSubmission:
    return ClusterSubmission(token="t1", terms=asked, count=count, folder=folder, supervisor=("python3", "x"))


def submitted(count: int = 1, settings: SlurmSettings | None = None, **said: object) -> list[str]:
    return commands.submit_command(submission(terms(**said), count), settings or SlurmSettings())


def starting(words: list[str], option: str) -> list[str]:
    return [word for word in words if word.startswith(option)]


def listed(**cells: str) -> bytes:
    """A line as squeue prints it for the columns that it is asked for."""
    asked = commands.list_command(0)[-1].removeprefix("--Format=").split(",")
    widths = {name: int(width) for name, width in (column.split(":") for column in asked)}
    said = {
        "ArrayJobID": "17",
        "ArrayTaskID": "3",
        "State": "RUNNING",
        "NodeList": "n0",
        "Comment": "gpuyard:t1",
        **cells,
    }
    assert said.keys() <= widths.keys()
    return b"".join(said.get(name, "").encode()[:width].ljust(width) for name, width in widths.items()) + b"\n"


def only(text: bytes) -> SlurmJobRow:
    (row,) = commands.parse_listing(text)
    return row


class TestSubmitting:
    def test_a_lone_element_is_no_array(self) -> None:
        assert submitted() == [
            "sbatch",
            "--parsable",
            "--no-requeue",
            "--export=ALL",
            "--nodes=1",
            "--ntasks=1",
            "--job-name=train",
            "--chdir=/shared/parcels/t1",
            "--output=/shared/parcels/t1/0.out",
            "--comment=gpuyard:t1",
        ]

    def test_a_comment_of_somebody_else_does_not_take_the_place_of_ours(self) -> None:
        settings = SlurmSettings(options=("--comment=site",))
        comments = starting(submitted(settings=settings, options=("--comment=mine",)), "--comment")
        assert comments[-1] == "--comment=gpuyard:t1"

    def test_several_are_an_array_each_with_an_output_of_its_own(self) -> None:
        words = submitted(12)
        assert "--array=0-11" in words
        assert "--output=/shared/parcels/t1/%a.out" in words

    def test_at_most_so_many_of_an_array_run_at_once(self) -> None:
        assert "--array=0-11%4" in submitted(12, at_most=4)

    def test_everything_that_terms_can_say(self) -> None:
        settings = SlurmSettings(
            partition="gpu", account="lab", qos="long", options=("--constraint=fast", "-v"), nice_base=100
        )
        words = submitted(
            settings=settings,
            need=Need(devices=2, model="a100"),
            ram_mb=1024.5,
            cpus=4,
            limit_s=61.0,
            expected_s=7200.0,
            priority=30,
            options=("--reservation=mine",),
        )
        assert words[9:] == [
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
        ("said", "minutes"),
        [(terms(limit_s=0.5), 1), (terms(limit_s=60.0), 1), (terms(limit_s=60.1), 2), (terms(expected_s=7200.0), 120)],
    )
    def test_time_is_in_whole_minutes_and_never_none_at_all(self, said: ClusterTerms, minutes: int) -> None:
        assert f"--time={minutes}" in commands.submit_command(submission(said), SlurmSettings())

    def test_what_has_no_limit_and_no_history_gets_the_sites_own(self) -> None:
        assert starting(submitted(), "--time") == []

    def test_nobody_asks_for_all_memory_by_asking_for_none(self) -> None:
        assert starting(submitted(ram_mb=0.0, cpus=0), "--mem") == []

    @pytest.mark.parametrize(
        ("base", "priority", "nice"), [(0, 5, None), (100, 100, None), (100, 500, None), (0, -3, 3)]
    )
    def test_nobody_is_less_nice_than_a_user_may(self, base: int, priority: int, nice: int | None) -> None:
        words = submitted(settings=SlurmSettings(nice_base=base), priority=priority)
        assert starting(words, "--nice") == ([] if nice is None else [f"--nice={nice}"])

    def test_a_folder_may_have_a_percent_sign_in_its_name(self) -> None:
        words = commands.submit_command(submission(terms(), 2, "/shared/100%a"), SlurmSettings())
        assert "--output=/shared/100%%a/%a.out" in words
        assert "--chdir=/shared/100%a" in words

    @pytest.mark.parametrize(
        ("name", "shown"),
        [
            ("a|b 'c' \"d\" %j", "a|b 'c' \"d\" %j"),
            ("two\nlines\x00\x1f", "two lines"),
            ("", "gpuyard"),
            ("n" * 5000, "n" * 200),
        ],
    )
    def test_any_name_becomes_one_that_slurm_takes(self, name: str, shown: str) -> None:
        assert starting(submitted(name=name), "--job-name") == [f"--job-name={shown}"]

    def test_the_script_runs_the_supervisor_with_the_elements_number(self) -> None:
        words = ("printf", "%s|", "it's", 'a "b" $HOME `x`', "two\nlines", "#SBATCH --hold", "")
        text = commands.script(ClusterSubmission(token="t", terms=terms(), count=9, folder="/f", supervisor=words))
        for environment, number in ({}, "0"), ({"SLURM_ARRAY_TASK_ID": "7"}, "7"):
            ran = subprocess.run(["/bin/sh"], input=text, env=environment, capture_output=True, text=True, check=True)
            assert ran.stdout.split("|")[:-1] == [*words[2:], number]
        assert text.startswith("#!/bin/sh\nexec ")

    @pytest.mark.parametrize(
        ("text", "job"),
        [("17\n", "17"), ("17;cluster\n", "17"), ("Welcome to 2 clusters!\n17\n", "17"), ("", None), ("no", None)],
    )
    def test_the_jobs_number(self, text: str, job: str | None) -> None:
        assert commands.parse_submission(text) == job


class TestGpus:
    def test_none_are_asked_for_where_none_are_needed(self) -> None:
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
            (Need(memory=RestOfDevice(5000.0)), "gpu:1"),
            (Need(memory=WholeDevice(5000.0)), "gpu:1"),
            (Need(devices=2, memory=FixedMemory(5000.0)), "gpu:2"),
        ],
    )
    def test_a_job_that_shares_its_gpu_asks_for_shards(self, need: Need, gres: str) -> None:
        assert starting(submitted(settings=SHARDS, need=need), "--gres") == [f"--gres={gres}"]

    def test_without_shards_it_gets_a_whole_one(self) -> None:
        assert starting(submitted(need=SHARED), "--gres") == ["--gres=gpu:1"]

    def test_a_part_of_a_card_of_unknown_size_is_a_whole_one(self) -> None:
        need = Need(memory=PartOfDevice(0.5))
        assert starting(submitted(settings=SlurmSettings(shard_mb=1.0), need=need), "--gres") == ["--gres=gpu:1"]


class TestListing:
    def test_one_call_is_for_all_jobs_of_the_user(self) -> None:
        words = commands.list_command(1000)
        assert words[:5] == ["squeue", "--noheader", "--array", "--states=all", "--user=1000"]

    def test_an_element_that_runs(self) -> None:
        row = only(listed(StartTime="1700000000", EndTime="1800000000", Reason="None", exit_code="0"))
        assert row == SlurmJobRow(
            job="17",
            number=3,
            token="t1",
            sighting=Sighting(id="17_3", at=SiteState.RUNNING, place="n0", started_at=1700000000.0),
        )

    def test_an_element_that_waits_has_not_started_whenever_it_is_expected_to(self) -> None:
        row = only(listed(State="PENDING", NodeList="", StartTime="1800000000", EndTime="NONE", Reason="Resources"))
        assert row.sighting == Sighting(id="17_3", at=SiteState.PENDING, reason="Resources: what it asks for is in use")

    def test_an_element_that_is_over(self) -> None:
        row = only(
            listed(
                State="FAILED", StartTime="1700000000", EndTime="1700000009", exit_code="768", Reason="NonZeroExitCode"
            )
        )
        assert row.sighting == Sighting(
            id="17_3", at=SiteState.FAILED, place="n0", started_at=1700000000.0, ended_at=1700000010.0, status=3
        )

    def test_one_that_was_cancelled_as_it_waited_never_started(self) -> None:
        row = only(listed(State="CANCELLED", NodeList="", StartTime="1700000000", EndTime="1700000000", exit_code="0"))
        assert row.sighting == Sighting(id="17_3", at=SiteState.CANCELLED, ended_at=1700000001.0)

    def test_what_is_no_array_has_no_number(self) -> None:
        row = only(listed(ArrayTaskID="N/A"))
        assert (row.job, row.number, row.sighting.id) == ("17", None, "17")

    def test_others_jobs_have_no_token(self) -> None:
        assert [row.token for row in commands.parse_listing(listed(Comment="(null)") + listed(Comment="mine"))] == [
            None,
            None,
        ]

    def test_whatever_others_write_into_their_jobs_harms_nobody(self) -> None:
        strange = (
            listed(Comment="two\nlines") + "\n| é x \x1f\n".encode() + b"\xff\xfe" + b"\n" + listed(Comment="é" * 200)
        )
        rows = commands.parse_listing(strange + listed(Reason="é" * 300))
        assert [row.token for row in rows][-1] == "t1"
        assert {row.job for row in rows} == {"17"}

    def test_a_long_state_is_read_whole(self) -> None:
        assert only(listed(State="OUT_OF_MEMORY")).sighting.at is SiteState.OUT_OF_MEMORY

    def test_a_job_that_never_had_a_node_has_no_status(self) -> None:
        assert only(listed(State="FAILED", NodeList="", exit_code="1", Reason="BadConstraints")).sighting.status is None

    def test_no_jobs_at_all(self) -> None:
        assert commands.parse_listing(b"") == []


class TestAccounts:
    def test_all_are_asked_about_in_one_call(self) -> None:
        words = commands.accounting_command({"9", "17"})
        assert words[0] == "sacct"
        assert words[-1] == "--jobs=17,9"

    def test_what_is_over_is_told(self) -> None:
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

    def test_what_they_think_still_runs_is_not_there_any_more(self) -> None:
        text = "17_3|RUNNING|0:0|1700000000|Unknown|n0\n17_[4-9]|PENDING|0:0|Unknown|Unknown|None assigned\n"
        assert commands.parse_accounting(text) == []

    def test_lines_that_cannot_be_read_are_passed_over(self) -> None:
        assert commands.parse_accounting("what?\n17_x|COMPLETED|0:0|1|2|n0\n\n|||||\n") == []


class TestCancelling:
    @pytest.mark.parametrize(
        ("ids", "words"),
        [
            (["17"], ["17"]),
            (["17_3"], ["17_[3]"]),
            (["17_0", "17_2", "17_1", "17_7", "17_1"], ["17_[0-2,7]"]),
            (["17_0", "9", "18_5", "17_1"], ["9", "17_[0-1]", "18_[5]"]),
        ],
    )
    def test_elements_of_an_array_are_one_word(self, ids: list[str], words: list[str]) -> None:
        assert list(commands.cancel_commands(ids)) == [["scancel", "--quiet", *words]]

    def test_many_are_cancelled_in_several_calls(self) -> None:
        calls = list(commands.cancel_commands([str(number) for number in range(1200)]))
        assert [len(call) - 2 for call in calls] == [500, 500, 200]

    def test_nothing_is_cancelled_in_no_call(self) -> None:
        assert list(commands.cancel_commands([])) == []


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
    def test_they_are_read_from_the_configuration(self, text: str, limits: SlurmLimits) -> None:
        assert commands.configuration_command()[0] == "scontrol"
        assert commands.parse_configuration(text) == limits


def test_settings_of_a_job_around_the_daemon_are_none_for_its_jobs() -> None:
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
