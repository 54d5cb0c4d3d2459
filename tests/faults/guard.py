"""Faults of the memory guard: when it acts, which job makes way, what follows, and which devices are read often."""

from tests.faults.fault import Fault

_GUARD, _CARDS = "src/gpuyard/policy/memory_guards.py", "src/gpuyard/queue/guard_memory.py"
_GUARD_TESTS = ("tests/unit/policy/test_memory_guard.py",)
_CARD_TESTS = ("tests/unit/queue/test_guard_memory.py",)
_WATCH_TESTS = ("tests/unit/policy/test_usage_curve.py",)

_WHEN_THE_GUARD_ACTS = (
    Fault(
        id="guard-waits-for-the-last-byte",
        file=_GUARD,
        old="    return max(numbers.RESERVE_MB, numbers.RESERVE_PART * capacity_mb)\n",
        new="    return 0.0\n",
        breaks="A card is full before the memory guard acts, and a program runs out of memory.",
        near=_GUARD_TESTS,
    ),
    Fault(
        id="guard-takes-a-loaded-model-for-a-climb",
        file=_GUARD,
        old="sum(job.steady_mb_s for job in growers)",
        new="sum(job.rate_mb_s for job in growers)",
        breaks="A job is suspended when another one loads its model, though both fit.",
        near=_GUARD_TESTS,
    ),
    Fault(
        id="guard-suspends-a-job-that-is-alone",
        file=_GUARD,
        old=" or (len(staying) == 1 and not has_other_leases())",
        new="",
        breaks="A job that has its card alone is suspended when it nearly fills it, and never gets further.",
        near=_GUARD_TESTS,
    ),
    Fault(
        id="guard-takes-noise-for-growth",
        file=_GUARD,
        old="if grown > numbers.NOISE_MB and seconds > 0.0",
        new="if grown > 0.0 and seconds > 0.0",
        breaks="A job on a full card is suspended because the driver rounds its figures.",
        near=_GUARD_TESTS,
    ),
    Fault(
        id="guard-takes-old-memory-for-growth",
        file=_GUARD,
        old="if not points and began_at is not None and at - began_at < numbers.YOUNG_S:",
        new="if not points and began_at is not None:",
        breaks="After a restart of the daemon, jobs that have long been flat are suspended.",
        near=_GUARD_TESTS,
    ),
    Fault(
        id="guard-takes-restored-memory-for-growth",
        file=_CARDS,
        old="if mb is None or live.job.state in (JobState.SUSPENDED, JobState.RESUMING):",
        new="if mb is None:",
        breaks="A job is suspended again as soon as its memory has been put back.",
        near=_CARD_TESTS,
    ),
    Fault(
        id="guard-is-blind-where-processes-are-hidden",
        file=_CARDS,
        old="        if device.hides_processes and card is not None:\n",
        new="        if False:\n",
        breaks="Where the driver lists no processes, the memory guard never acts.",
        near=_CARD_TESTS,
    ),
    Fault(
        id="guard-ignores-jobs-that-outgrew-their-memory",
        file=_CARDS,
        old="in (*jobs.unpredicted.items(), *jobs.outgrown.items())",
        new="in jobs.unpredicted.items()",
        breaks="A job that takes more than it declared makes its neighbours run out of memory.",
        near=_CARD_TESTS,
    ),
    Fault(
        id="guard-counts-any-lease",
        file=_CARDS,
        old="        if foreign is None or foreign < guards.reserve_mb(_figures(device)[1]):\n",
        new="        if False:\n",
        breaks="Any user can have the jobs of others suspended with a small lease on their card.",
        near=_CARD_TESTS,
    ),
    Fault(
        id="guard-counts-younger-leases",
        file=_CARDS,
        old=" and self._from_wall(lease.since) <= first for lease in others",
        new=" for lease in others",
        breaks="A job is suspended for a script of another user that came later.",
        near=_CARD_TESTS,
    ),
    Fault(
        id="guard-acts-for-a-job-that-has-ended",
        file=_CARDS,
        old="            alarm = self._alarm(device, first_runs, now)\n            if alarm",
        new="            alarm = self._alarms[device.id]\n            if alarm",
        breaks="The daemon's step fails if a job ends between an alarm and the step that follows.",
        near=_CARD_TESTS,
    ),
)

_WHICH_JOB_MAKES_WAY = (
    Fault(
        id="guard-moves-the-oldest",
        file=_GUARD,
        old="victim, first = max(movable, key=_start_order), min(staying, key=_start_order)",
        new="victim, first = min(movable, key=_start_order), min(staying, key=_start_order)",
        breaks="The job that was there first makes way for one that came later.",
        near=_GUARD_TESTS,
    ),
    Fault(
        id="guard-moves-jobs-within-their-memory",
        file=_GUARD,
        old="first_runs = [job for job in staying if job.is_first_run and job.may_be_moved]",
        new="first_runs = [job for job in staying if job.may_be_moved]",
        breaks="A job that stays within its declared memory is suspended because another one grows.",
        near=_GUARD_TESTS,
    ),
    Fault(
        id="guard-moves-jobs-against-their-user",
        file=_GUARD,
        old="if job.is_first_run and job.may_be_moved]",
        new="if job.is_first_run]",
        breaks="A job with --on-preempt never is suspended.",
        near=_GUARD_TESTS,
    ),
    Fault(
        id="guard-moves-several-for-one",
        file=_GUARD,
        old="expected = free_mb + sum(job.held_mb for job in jobs if job.is_leaving)",
        new="expected = free_mb",
        breaks="While one job makes way, the others on the card are suspended one after the other.",
        near=_GUARD_TESTS,
    ),
    Fault(
        id="guard-moves-a-resumed-job-again",
        file=_GUARD,
        old="if not job.is_spared or job.rate_mb_s > 0.0]",
        new="]",
        breaks="The same job is suspended and resumed over and over.",
        near=_GUARD_TESTS,
    ),
    Fault(
        id="guard-spares-from-the-suspension-on",
        file=_CARDS,
        old="                self._left_at[each.job.id] = now\n        for known",
        new="                pass\n        for known",
        breaks="A job that was suspended for some minutes is suspended again right after it was resumed.",
        near=_CARD_TESTS,
    ),
    Fault(
        id="guard-trusts-a-long-grace",
        file=_GUARD,
        old="0.0 <= now - at < numbers.STOPS_WITHIN_S",
        new="0.0 <= now - at",
        breaks="A job that saves its work for ten minutes after SIGTERM keeps the memory guard off.",
        near=_GUARD_TESTS,
    ),
    Fault(
        id="guard-tries-at-each-reading",
        file=_CARDS,
        old="self._kept_at[live.job.id] = now + 1.0",
        new="self._kept_at[live.job.id] = now",
        breaks="The daemon runs a step ten times a second for a job that can neither be suspended nor stopped.",
        near=_CARD_TESTS,
    ),
)

_WHAT_FOLLOWS = (
    Fault(
        id="guard-stops-the-first-job",
        file=_GUARD,
        old="    return not alarm.is_first and ran_s <= numbers.MOST_LOST_S\n",
        new="    return ran_s <= numbers.MOST_LOST_S\n",
        breaks="Where jobs cannot be suspended, the job that was there first is stopped.",
        near=_GUARD_TESTS,
    ),
    Fault(
        id="guard-stops-long-runs",
        file=_GUARD,
        old="    return not alarm.is_first and ran_s <= numbers.MOST_LOST_S\n",
        new="    return not alarm.is_first\n",
        breaks="Where jobs cannot be suspended, a job loses hours of work.",
        near=_GUARD_TESTS,
    ),
    Fault(
        id="guard-resumes-where-just-enough-is-free",
        file=_GUARD,
        old="    return max(held_mb * numbers.CLEARLY_MORE, held_mb + numbers.CLEARLY_MORE_MB, expected_mb)\n",
        new="    return held_mb\n",
        breaks="A job that still grows is resumed on a card that is full a moment later.",
        near=_GUARD_TESTS,
    ),
    Fault(
        id="guard-asks-for-more-than-is-ever-free",
        file=_GUARD,
        old="most = min(numbers.NEARLY_ALL * capacity_mb, capacity_mb - foreign_mb - reserve_mb(capacity_mb))",
        new="most = capacity_mb",
        breaks="A stopped job waits for ever on a card with a desktop.",
        near=_GUARD_TESTS,
    ),
    Fault(
        id="guard-forgets-what-a-stopped-job-needs",
        file=_CARDS,
        old="            transitions.set_growth(live.job.id, growth)\n",
        new="",
        breaks="A stopped job starts again beside the same neighbours, and is stopped again.",
        near=_CARD_TESTS,
    ),
    Fault(
        id="guard-leaves-the-card-open",
        file=_CARDS,
        old="            if gate.is_closed:\n                self._gates[device.id] = gate\n",
        new="",
        breaks="New jobs start on the card whose memory has just run out.",
        near=_CARD_TESTS,
    ),
    Fault(
        id="guard-opens-the-card-at-once",
        file=_GUARD,
        old="alarm is None and free_mb >= reserve_mb(capacity_mb), now, numbers.REOPEN_AFTER_S)",
        new="alarm is None and free_mb >= reserve_mb(capacity_mb), now, 0.0)",
        breaks="The memory that a suspended job has left is given to a new job while the others still grow.",
        near=_GUARD_TESTS,
    ),
    Fault(
        id="guard-does-not-tell-of-a-stop",
        file=_CARDS,
        old=(
            "            transitions.stop(live.job.id, OutcomeKind.MEMORY_GUARD, now, text)\n"
            "            transitions.publish_made_way(live.job.id, now, text)\n"
        ),
        new="            transitions.stop(live.job.id, OutcomeKind.MEMORY_GUARD, now, text)\n",
        breaks="A user who asked for it is not notified that a job was stopped and queued again.",
        near=_CARD_TESTS,
    ),
    Fault(
        id="guard-notifies-every-target",
        file="src/gpuyard/model/subscriptions.py",
        old="    events: tuple[Event, ...] = DEFAULT_EVENTS\n",
        new="    events: tuple[Event, ...] = JOB_EVENTS\n",
        breaks="Everyone with --notify gets a message each time that a job is suspended for a moment.",
        near=("tests/unit/daemon/notify/test_messages.py",),
    ),
    Fault(
        id="guard-resumed-with-less-than-it-held",
        file="src/gpuyard/queue/suspend_jobs.py",
        old="on_each = tuple(needed.items()) if len(set(needed.values())) > 1 else ()",
        new="on_each = ()",
        breaks="A job on several GPUs is resumed where less is free than it held, and is lost.",
        near=("tests/unit/queue/test_suspend_jobs.py",),
    ),
    Fault(
        id="guard-forgets-what-was-promised",
        file=_GUARD,
        old=" or job.missing_mb > expected]",
        new="]",
        breaks="A job runs out of memory within what it declared, as first runs have taken it.",
        near=(*_GUARD_TESTS, *_CARD_TESTS),
    ),
)

_WATCHED_DEVICES = (
    Fault(
        id="guard-known-jobs-grow-unwatched",
        file="src/gpuyard/queue/guard_memory.py",
        old=" for live in first_runs.values()), now) | growing\n",
        new=" for live in first_runs.values()), now)\n",
        breaks="The memory of a card is read once a second while a known job takes the rest of it beside first runs.",
        near=("tests/unit/queue/test_guard_memory.py",),
    ),
    Fault(
        id="guard-flat-memory-is-read-often",
        file="src/gpuyard/policy/usage_curve.py",
        old="ran_s - usage.grew_at_s < 5.0 if usage is not None",
        new="True if usage is not None",
        breaks="The daemon reads the GPUs ten times a second for as long as a first run lasts.",
        near=_WATCH_TESTS,
    ),
    Fault(
        id="guard-unused-devices-are-read-often",
        file="src/gpuyard/policy/usage_curve.py",
        old="else ran_s < 120.0\n",
        new="else True\n",
        breaks="The daemon reads the GPUs ten times a second for a program that never uses them.",
        near=_WATCH_TESTS,
    ),
    Fault(
        id="guard-rounded-figures-count-as-outgrown",
        file="src/gpuyard/policy/usage_curve.py",
        old="peak > reserved * 1.05",
        new="peak > reserved",
        breaks="A job that uses exactly what it declared is suspended.",
        near=_WATCH_TESTS,
    ),
)

FAULTS = (*_WHEN_THE_GUARD_ACTS, *_WHICH_JOB_MAKES_WAY, *_WHAT_FOLLOWS, *_WATCHED_DEVICES)
