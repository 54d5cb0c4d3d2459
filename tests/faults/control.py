"""Faults of the controller: what it records, what it requests from engines and the ledger, and in which order."""

from tests.faults.fault import Fault

_CONTROL = "src/gpuyard/control"
_SCENARIOS = "tests/simulation/test_scenarios.py"
_MEMORY = "tests/simulation/test_memory_scenarios.py"
_FAULTS = "tests/integration/test_queue_faults.py"

FAULTS = (
    Fault(
        id="control-removed-leases-are-free",
        file="src/gpuyard/control/own_leases.py",
        old="        return (*leases, *missing)\n",
        new="        return tuple(leases)\n",
        breaks="When lease files are removed, the daemon starts a second job on the cards of running ones.",
        near=("tests/unit/control/test_own_leases.py", "tests/integration/test_removed_leases.py"),
    ),
    Fault(
        id="control-programs-begin-before-the-commit",
        file=f"{_CONTROL}/controller.py",
        old=" if may_start else self._wait_for_sample(now)\n        except",
        new=(
            " if may_start else self._wait_for_sample(now)\n"
            "                self.engines.start_prepared()\n"
            "        except"
        ),
        breaks="After a crash of the daemon at the wrong moment, a job runs that is still queued in the database.",
        near=("tests/simulation/test_crashes.py",),
    ),
    Fault(
        id="control-lease-kept-by-the-daemon",
        file=f"{_CONTROL}/controller.py",
        old="        for held in granted:\n            held.leave()\n",
        new="",
        breaks="The GPU of a job that has ended stays leased until the daemon ends.",
        near=(_SCENARIOS,),
    ),
    Fault(
        id="control-lease-of-a-failed-step-kept",
        file=f"{_CONTROL}/controller.py",
        old="            for held in granted:\n                held.release()\n            raise\n",
        new="            raise\n",
        breaks="A GPU that was granted in a step that could not be recorded stays leased until the daemon ends.",
        near=("tests/simulation/test_crashes.py",),
    ),
    Fault(
        id="control-killed-gently",
        file=f"{_CONTROL}/stop_signals.py",
        old="                self._engines.signal(attempt, signal.SIGKILL)\n",
        new="                self._engines.signal(attempt, signal.SIGTERM)\n",
        breaks="A program that ignores SIGTERM keeps running after it was cancelled or its time limit has passed.",
        near=(f"{_SCENARIOS}::test_a_cancelled_job_that_ignores_sigterm_is_killed_after_its_grace",),
    ),
    Fault(
        id="control-time-limit-runs-while-suspended",
        file=f"{_CONTROL}/stop_signals.py",
        old="            is_running = live.job.state is JobState.RUNNING  #",
        new="            is_running = live.job.state is not JobState.STOPPING  #",
        breaks="A suspended job is stopped by a time limit that includes its suspended time.",
        near=(f"{_MEMORY}::test_the_time_limit_does_not_count_while_a_job_is_suspended",),
    ),
    Fault(
        id="control-half-a-submission-stays",
        file=f"{_CONTROL}/controller.py",
        old="            self._store.drop_incomplete_submissions()\n",
        new="",
        breaks="Jobs of a submission that was never acknowledged stay in the queue after a crash.",
        near=("tests/simulation/test_crashes.py",),
    ),
    Fault(
        id="control-lost-program-runs-on",
        file=f"{_CONTROL}/attempt_ends.py",
        old="if attempt.stopping is not None or ended.outcome.kind is OutcomeKind.LOST:",
        new="if attempt.stopping is not None:",
        breaks="When a keeper dies, its program keeps running beside the next attempt of the job.",
        near=(
            "tests/simulation/test_crashes.py",
            f"{_FAULTS}::test_a_program_whose_keeper_was_killed_is_ended_before_its_job_is_retried",
        ),
    ),
    Fault(
        id="control-ends-lost-with-a-failed-step",
        file=f"{_CONTROL}/attempt_ends.py",
        old="        if not self._unrecorded:  #",
        new="        if True:  #",
        breaks="An end that could not be recorded because the disk was full is never recorded.",
        near=(
            _SCENARIOS,
            f"{_FAULTS}::test_a_full_disk_rejects_submissions_loses_no_job_and_the_queue_continues_after_it",
        ),
    ),
    Fault(
        id="control-news-of-what-was-taken-back",
        file=f"{_CONTROL}/transitions.py",
        old="            del self.events[known:]\n",
        new="",
        breaks="Users are notified of an end that was rolled back, and then of the same end again.",
        near=("tests/unit/control/test_published_events.py",),
    ),
    Fault(
        id="control-devices-named-twice",
        file="src/gpuyard/control/launch_command.py",
        old='visible[task.variable] = visible.pop("CUDA_VISIBLE_DEVICES")',
        new='visible[task.variable] = visible["CUDA_VISIBLE_DEVICES"]',
        breaks="A task gets CUDA_VISIBLE_DEVICES in addition to the variable that cuda_visible_devices_var names.",
        near=("tests/integration/test_workspace_settings.py::test_every_task_gets_the_settings_of_the_workspace",),
    ),
    Fault(
        id="control-retry-without-a-pause",
        file=f"{_CONTROL}/transitions.py",
        old="due_at=now + verdict.delay_s if state is JobState.DELAYED else None,",
        new="due_at=now if state is JobState.DELAYED else None,",
        breaks="A job that fails at once uses up all its retries within a second.",
        near=(f"{_SCENARIOS}::test_a_job_that_fails_is_retried_after_pauses_that_double",),
    ),
    Fault(
        id="control-rerun-with-the-same-memory",
        file=f"{_CONTROL}/transitions.py",
        old="            self.store.set_growth(job.id, verdict.growth)\n",
        new="",
        breaks="A job that ran out of memory is retried with the same memory, forever.",
        near=(_MEMORY,),
    ),
    Fault(
        id="control-preempted-success-runs-again",
        file=f"{_CONTROL}/transitions.py",
        old="attempt.stopping is OutcomeKind.PREEMPTED and outcome.kind is OutcomeKind.SUCCEEDED",
        new="False",
        breaks="A job that succeeded just as it was being preempted runs a second time.",
        near=("tests/unit/control/test_attempt_ends.py",),
    ),
    Fault(
        id="control-resumed-without-a-lease",
        file=f"{_CONTROL}/suspend_jobs.py",
        old="if key in self._requested or (live.job.state is JobState.RESUMING and key[0] not in self._granted):",
        new="if key in self._requested:",
        breaks="After a crash, a suspended job is resumed on a GPU with memory that other jobs use by then.",
        near=("tests/unit/control/test_attempt_ends.py",),
    ),
    Fault(
        id="control-memory-given-away-before-it-is-free",
        file=f"{_CONTROL}/suspend_jobs.py",
        old="if each.job.state is JobState.SUSPENDED and each.attempt.lease_id in live",
        new="if each.job.state in IN_SUSPENSION and each.attempt.lease_id in live",
        breaks="The memory of a job that is being suspended is given to another job while it is still in use.",
        near=(_MEMORY,),
    ),
    Fault(
        id="control-refused-by-a-cluster-offered-at-once",
        file=f"{_CONTROL}/cluster_dispatch.py",
        old="if now < until},",
        new="if now > until},",
        breaks="A job that a cluster refuses is handed over again in every step.",
        near=("tests/unit/control/test_cluster_dispatch.py",),
    ),
    Fault(
        id="control-lost-node-costs-a-retry",
        file=f"{_CONTROL}/cluster_dispatch.py",
        old="            return after_loss(job, len(lost_before))\n",
        new="            return None\n",
        breaks="A job counts as failed when its cluster node dies, and is not retried.",
        near=("tests/unit/control/test_cluster_dispatch.py",),
    ),
    Fault(
        id="control-estimates-not-written-down",
        file=f"{_CONTROL}/learn_estimates.py",
        old="            self._store.set_profile(fingerprint, profile)\n",
        new="            pass\n",
        breaks="All estimates of memory and time are lost when the daemon restarts.",
        near=("tests/unit/control/test_learn_estimates.py",),
    ),
    Fault(
        id="control-token-not-looked-up",
        file=f"{_CONTROL}/add_submission.py",
        old="before = self._store.find_submission(submission.token) if submission.token else None",
        new="before = None",
        breaks="A submission that a client repeats after a crash is refused, or runs twice.",
        near=("tests/unit/daemon/test_loop.py",),
    ),
    Fault(
        id="control-dependants-of-a-large-submission-forgotten",
        file=f"{_CONTROL}/add_submission.py",
        old="                        now = self._first_job(submission, user, wanted)",
        new="                        now = like",
        breaks="A large array waits forever for a job that ended while the array was being submitted.",
        near=("tests/unit/control/test_many_dependencies.py",),
    ),
    Fault(
        id="control-place-in-line-kept-after-a-start",
        file=f"{_CONTROL}/ledger_ticket.py",
        old="        if head is None or has_started:\n",
        new="        if head is None:\n",
        breaks="The queue is repeatedly served before scripts that have waited longer.",
        near=("tests/unit/control/test_ledger_ticket.py",),
    ),
)
