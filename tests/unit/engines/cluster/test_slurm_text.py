"""Slurm's states, reasons, exit codes and complaints, and what they are taken for."""

import pytest

from gpuyard.engines.cluster.site import SiteRefused, SiteState, SiteUnreachable
from gpuyard.engines.cluster.slurm_text import fault_of, reason_of, state_of, status_of, unanswered


class TestStates:
    @pytest.mark.parametrize(
        ("state", "at"),
        [
            ("PENDING", SiteState.PENDING),
            ("CONFIGURING", SiteState.PENDING),
            ("REQUEUED", SiteState.PENDING),
            ("SPECIAL_EXIT", SiteState.PENDING),
            ("RUNNING", SiteState.RUNNING),
            ("COMPLETING", SiteState.RUNNING),
            ("SUSPENDED", SiteState.RUNNING),
            ("STAGE_OUT", SiteState.RUNNING),
            ("COMPLETED", SiteState.SUCCEEDED),
            ("FAILED", SiteState.FAILED),
            ("TIMEOUT", SiteState.TIMED_OUT),
            ("DEADLINE", SiteState.TIMED_OUT),
            ("OUT_OF_MEMORY", SiteState.OUT_OF_MEMORY),
            ("NODE_FAIL", SiteState.LOST),
            ("BOOT_FAIL", SiteState.LOST),
            ("REVOKED", SiteState.LOST),
            ("PREEMPTED", SiteState.PREEMPTED),
            ("CANCELLED", SiteState.CANCELLED),
        ],
    )
    def test_each_has_its_place(self, state: str, at: SiteState) -> None:
        assert state_of(state, "n0") is at

    def test_one_that_nobody_knows_is_no_end(self) -> None:
        assert state_of("BRAND_NEW", "n0") is SiteState.RUNNING
        assert state_of("BRAND_NEW", "") is SiteState.PENDING

    @pytest.mark.parametrize(
        ("reason", "words"),
        [
            ("None", ""),
            ("(null)", ""),
            ("Priority", "Priority: others are ahead of it"),
            ("QOSMaxGRESPerUser", "QOSMaxGRESPerUser: a limit of its QOS is reached"),
            ("AssocGrpGRES", "AssocGrpGRES: a limit of its account or user is reached"),
            (
                "ReqNodeNotAvail, UnavailableNodes:n0",
                "ReqNodeNotAvail, UnavailableNodes:n0: a node that it needs is down, drained or reserved",
            ),
            ("SomethingElse", "SomethingElse"),
        ],
    )
    def test_a_reason_is_slurms_word_and_plain_ones(self, reason: str, words: str) -> None:
        assert reason_of("PENDING", reason) == words

    def test_a_job_that_slurm_suspends_says_so(self) -> None:
        assert reason_of("SUSPENDED", "None") == "suspended by Slurm"

    @pytest.mark.parametrize(
        ("code", "status"),
        [
            ("0", 0),
            ("768", 3),
            ("9", 137),
            ("15", 143),
            ("0:0", 0),
            ("3:0", 3),
            ("0:9", 137),
            ("4021", None),
            ("", None),
        ],
    )
    def test_exit_codes_of_the_list_and_of_the_accounts(self, code: str, status: int | None) -> None:
        assert status_of(code) == status

    @pytest.mark.parametrize("code", ["x", "1:x", "x:1", "1:", "-1"])
    def test_an_exit_code_that_cannot_be_read_is_unknown(self, code: str) -> None:
        assert status_of(code) is None


class TestFaults:
    @pytest.mark.parametrize(
        "said",
        [
            "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)\n",
            "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n",
            "sbatch: error: Munge encode failed: Failed to connect\nsbatch: error: Protocol authentication error\n",
            "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying\n",
            "sbatch: fatal: Could not establish a configuration source\n",
        ],
    )
    def test_what_nobody_answered_may_have_been_done(self, said: str) -> None:
        fault = fault_of("sbatch", 1, said)
        assert isinstance(fault, SiteUnreachable)
        assert fault.hint

    @pytest.mark.parametrize(
        ("said", "words"),
        [
            (
                "sbatch: error: no such: nope\nsbatch: error: Batch job submission failed: Invalid partition name\n",
                "Slurm refused it: no such: nope; Invalid partition name",
            ),
            (
                "sbatch: error: Batch job submission failed: Requested node configuration is not available\n",
                "Slurm refused it: Requested node configuration is not available",
            ),
            (
                "sbatch: unrecognized option '--nonsense'\nTry \"sbatch --help\" for more information\n",
                "Slurm refused it: unrecognized option '--nonsense'; Try \"sbatch --help\" for more information",
            ),
            ("", "Slurm refused it: sbatch exited with status 1"),
        ],
    )
    def test_a_refusal_is_in_sbatchs_own_words(self, said: str, words: str) -> None:
        fault = fault_of("sbatch", 1, said)
        assert isinstance(fault, SiteRefused)
        assert fault.message == words

    def test_who_has_too_many_jobs_is_told_what_to_change(self) -> None:
        said = (
            "sbatch: error: AssocMaxSubmitJobLimit\n"
            "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's "
            "size and/or time limits)\n"
        )
        fault = fault_of("sbatch", 1, said)
        assert isinstance(fault, SiteRefused)
        assert fault.hint is not None
        assert "most_jobs" in fault.hint

    @pytest.mark.parametrize("program", ["sbatch", "scancel"])
    def test_a_command_that_was_killed_answered_nothing(self, program: str) -> None:
        assert isinstance(fault_of(program, -9, ""), SiteUnreachable)

    @pytest.mark.parametrize("program", ["squeue", "sacct", "scontrol", "scancel"])
    def test_only_a_submission_is_refused(self, program: str) -> None:
        fault = fault_of(program, 1, f"{program}: error: something else\n")
        assert isinstance(fault, SiteUnreachable)
        assert fault.message == "something else"

    def test_a_command_that_takes_too_long_is_quoted(self) -> None:
        assert (
            str(unanswered("sbatch", 30.0, "sbatch: error: sleeping\n"))
            == "sbatch did not answer within 30 s: sleeping"
        )
        assert str(unanswered("sbatch", 30.0, "")) == "sbatch did not answer within 30 s"

    @pytest.mark.parametrize(
        "said",
        [
            "",
            "scancel: error: Kill job error on job id 99: Invalid job id specified\n",
            "scancel: error: 99: Invalid job id specified\nscancel: error: 98: Job/step already completed\n",
        ],
    )
    def test_what_was_over_before_it_was_cancelled_is_none(self, said: str) -> None:
        assert fault_of("scancel", 1, said) is None

    def test_whatever_else_scancel_says_is_one(self) -> None:
        said = (
            "scancel: error: Kill job error on job id 99: Invalid job id specified\n"
            "scancel: error: Kill job error on job id 1: Unable to contact slurm controller (connect failure)\n"
        )
        assert isinstance(fault_of("scancel", 8, said), SiteUnreachable)
