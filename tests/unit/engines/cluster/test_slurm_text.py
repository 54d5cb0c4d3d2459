"""How Slurm's states, reasons, exit codes and error messages are interpreted."""

import pytest

from gpuyard.engines.cluster.site import SiteRefused, SiteState, SiteUnreachable
from gpuyard.engines.cluster.slurm_commands import fault_of, reason_of, state_of, status_of, unanswered


@pytest.mark.parametrize(
    ("state", "at"),
    [
        ("PENDING", SiteState.PENDING), ("CONFIGURING", SiteState.PENDING), ("REQUEUED", SiteState.PENDING),
        ("SPECIAL_EXIT", SiteState.PENDING), ("RUNNING", SiteState.RUNNING), ("COMPLETING", SiteState.RUNNING),
        ("SUSPENDED", SiteState.SUSPENDED), ("STOPPED", SiteState.SUSPENDED), ("STAGE_OUT", SiteState.RUNNING),
        ("COMPLETED", SiteState.SUCCEEDED), ("FAILED", SiteState.FAILED), ("TIMEOUT", SiteState.TIMED_OUT),
        ("DEADLINE", SiteState.TIMED_OUT), ("OUT_OF_MEMORY", SiteState.OUT_OF_MEMORY),
        ("NODE_FAIL", SiteState.LOST), ("BOOT_FAIL", SiteState.LOST), ("REVOKED", SiteState.LOST),
        ("PREEMPTED", SiteState.PREEMPTED), ("CANCELLED", SiteState.CANCELLED),
    ],
)  # fmt: skip
def test_each_state_is_mapped(state: str, at: SiteState) -> None:
    assert state_of(state, "n0") is at


def test_an_unknown_state_does_not_count_as_ended() -> None:
    assert state_of("BRAND_NEW", "n0") is SiteState.RUNNING
    assert state_of("BRAND_NEW", "") is SiteState.PENDING


@pytest.mark.parametrize(
    ("reason", "explained"),
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
def test_a_reason_is_slurms_code_with_an_explanation(reason: str, explained: str) -> None:
    assert reason_of(reason) == explained


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("0", 0), ("768", 3), ("9", 137), ("15", 143), ("0:0", 0), ("3:0", 3), ("0:9", 137), ("4021", None),
        ("", None),
    ],
)  # fmt: skip
def test_exit_codes_of_squeue_and_sacct(code: str, status: int | None) -> None:
    assert status_of(code) == status


@pytest.mark.parametrize("code", ["x", "1:x", "x:1", "1:", "-1"])
def test_a_malformed_exit_code_is_unknown(code: str) -> None:
    assert status_of(code) is None


@pytest.mark.parametrize(
    "stderr",
    [
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)\n",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n",
        "sbatch: error: Munge encode failed: Failed to connect\nsbatch: error: Protocol authentication error\n",
        "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying\n",
        "sbatch: fatal: Could not establish a configuration source\n",
    ],
)
def test_a_request_without_an_answer_may_have_been_carried_out(stderr: str) -> None:
    fault = fault_of("sbatch", 1, stderr)
    assert isinstance(fault, SiteUnreachable)
    assert fault.hint


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        (
            "sbatch: error: no such: nope\nsbatch: error: Batch job submission failed: Invalid partition name\n",
            "no such: nope; Invalid partition name",
        ),
        (
            "sbatch: error: Batch job submission failed: Requested node configuration is not available\n",
            "Requested node configuration is not available",
        ),
        (
            "sbatch: unrecognized option '--nonsense'\nTry \"sbatch --help\" for more information\n",
            "unrecognized option '--nonsense'; Try \"sbatch --help\" for more information",
        ),
        ("", "sbatch exited with status 1"),
    ],
)
def test_a_refusal_quotes_sbatch(stderr: str, message: str) -> None:
    fault = fault_of("sbatch", 1, stderr)
    assert isinstance(fault, SiteRefused)
    assert fault.message == message


def test_the_refusal_for_too_many_jobs_names_the_setting_to_change() -> None:
    stderr = (
        "sbatch: error: AssocMaxSubmitJobLimit\n"
        "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's "
        "size and/or time limits)\n"
    )
    fault = fault_of("sbatch", 1, stderr)
    assert isinstance(fault, SiteRefused)
    assert fault.hint is not None
    assert "most_jobs" in fault.hint


@pytest.mark.parametrize("program", ["sbatch", "scancel"])
def test_a_killed_command_gave_no_answer(program: str) -> None:
    assert isinstance(fault_of(program, -9, ""), SiteUnreachable)


@pytest.mark.parametrize("program", ["squeue", "sacct", "scontrol", "scancel"])
def test_only_a_submission_can_be_refused(program: str) -> None:
    fault = fault_of(program, 1, f"{program}: error: something else\n")
    assert isinstance(fault, SiteUnreachable)
    assert fault.message == "something else"


def test_a_timeout_names_the_command() -> None:
    assert str(unanswered("sbatch", 30.0, "sbatch: error: sleeping\n")) == "sbatch did not answer within 30 s: sleeping"
    assert str(unanswered("sbatch", 30.0, "")) == "sbatch did not answer within 30 s"


@pytest.mark.parametrize(
    "stderr",
    [
        "",
        "scancel: error: Kill job error on job id 99: Invalid job id specified\n",
        "scancel: error: 99: Invalid job id specified\nscancel: error: 98: Job/step already completed\n",
    ],
)
def test_cancelling_an_ended_job_is_not_a_fault(stderr: str) -> None:
    assert fault_of("scancel", 1, stderr) is None


def test_any_other_message_of_scancel_is_a_fault() -> None:
    stderr = (
        "scancel: error: Kill job error on job id 99: Invalid job id specified\n"
        "scancel: error: Kill job error on job id 1: Unable to contact slurm controller (connect failure)\n"
    )
    assert isinstance(fault_of("scancel", 8, stderr), SiteUnreachable)
