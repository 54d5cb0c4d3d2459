"""Faults of jobs that share a GPU: what is expected of first runs, and how much jobs slow each other."""

from tests.faults.fault import Fault

_PEAK_TESTS = ("tests/unit/policy/test_newcomer.py",)
_NEWCOMER_TESTS = ("tests/unit/policy/test_newcomer.py",)
_SHARING_TESTS = ("tests/unit/policy/test_sharing.py",)
_ADJUST_TESTS = ("tests/unit/queue/test_adjust_leases.py",)

_WHAT_IS_EXPECTED = (
    Fault(
        id="sharing-one-run-speaks-for-a-program",
        file="src/gpuyard/policy/numbers.py",
        old="PROGRAM_WEIGHT = 1.0",
        new="PROGRAM_WEIGHT = 0.0",
        breaks="After one small run of a program, all its other runs are packed as if they were as small.",
        near=_PEAK_TESTS,
    ),
    Fault(
        id="sharing-a-flat-second-counts-as-the-peak",
        file="src/gpuyard/policy/estimates.py",
        old="    place = bisect_right(FLAT_S, flat_s)\n",
        new="    place = len(FLAT_S)\n",
        breaks="Others join a program that has only loaded its model, and all run out of memory.",
        near=_PEAK_TESTS,
    ),
    Fault(
        id="sharing-late-climbs-are-not-learned",
        file="src/gpuyard/policy/estimates.py",
        old="    parts = [max(0.0, peak_mb - level) / peak_mb for level in levels_mb]\n",
        new="    parts = [0.0 for level in levels_mb]\n",
        breaks="A program that takes half of its memory after a minute is packed too closely each time.",
        near=_PEAK_TESTS,
    ),
    Fault(
        id="sharing-runs-of-one-command-count-as-independent",
        file="src/gpuyard/policy/numbers.py",
        old="ALIKE_JOBS = 0.3",
        new="ALIKE_JOBS = 0.0",
        breaks="An array of a program that needs more than expected runs out of memory as a whole.",
        near=_PEAK_TESTS,
    ),
    Fault(
        id="sharing-old-runs-never-fade",
        file="src/gpuyard/policy/estimates.py",
        old="        part = min(1.0, numbers.KEPT_RUNS / (self.count + 1.0))\n",
        new="        part = 1.0\n",
        breaks="What first runs needed a year ago decides what is expected of them today.",
        near=_PEAK_TESTS,
    ),
    Fault(
        id="sharing-what-a-job-holds-is-not-charged",
        file="src/gpuyard/policy/estimates.py",
        old="return ExpectedPeak(level_mb + mean * whole,",
        new="return ExpectedPeak(mean * whole,",
        breaks="The lease of a first run reserves less than the job holds.",
        near=_PEAK_TESTS,
    ),
    Fault(
        id="sharing-others-join-a-job-that-is-alone-too-early",
        file="src/gpuyard/policy/usage_curve.py",
        old="if not is_measured or self.flat_s < ALONE_FLAT_S or at_most_mb >= device_mb:",
        new="if not is_measured or at_most_mb >= device_mb:",
        breaks='With first_run = "alone", others join a first run as soon as it uses some memory.',
        near=_NEWCOMER_TESTS,
    ),
    Fault(
        id="sharing-leases-change-at-each-sample",
        file="src/gpuyard/policy/usage_curve.py",
        old="has_other_memory = abs(has_mb - had_mb) >= max(128.0, 0.05 * had_mb)",
        new="has_other_memory = has_mb != had_mb",
        breaks="Each sample rewrites the lease files of first runs and runs a step of the scheduler.",
        near=_NEWCOMER_TESTS,
    ),
    Fault(
        id="sharing-running-jobs-show-nothing",
        file="src/gpuyard/queue/own_leases.py",
        old="                if newcomer.flat_s >= 1.0:  # its memory says what to expect of others of its program\n",
        new="                if False:\n",
        breaks="An array of a small new program is packed by guesses until its first run has ended.",
        near=_ADJUST_TESTS,
    ),
    Fault(
        id="sharing-a-job-confirms-itself",
        file="src/gpuyard/queue/own_leases.py",
        old="for other, peak in found if other.id != but])",
        new="for other, peak in found])",
        breaks="What is expected of a first run is what it shows itself, so others join it too closely.",
        near=_ADJUST_TESTS,
    ),
)

_SLOW_DOWN = (
    Fault(
        id="sharing-jobs-join-though-all-get-slower",
        file="src/gpuyard/policy/sharing.py",
        old="    return after >= before * (1.0 + least_percent / 100.0) - 1e-9\n",
        new="    return True\n",
        breaks="Jobs that each keep a GPU busy share it, and take longer than one after the other.",
        near=_SHARING_TESTS,
    ),
    Fault(
        id="sharing-foreign-load-slows-no-job",
        file="src/gpuyard/policy/sharing.py",
        old="    total = sum([load for load, _ in members]) + foreign_percent\n",
        new="    total = sum([load for load, _ in members])\n",
        breaks="Jobs join a GPU that a program outside gpuyard keeps busy, as if it were idle.",
        near=_SHARING_TESTS,
    ),
    Fault(
        id="sharing-unknown-load-counts-as-none",
        file="src/gpuyard/policy/sharing.py",
        old="load = min(100.0, numbers.UNKNOWN_LOAD_PERCENT + caution * numbers.LOAD_SPREAD)",
        new="load = 0.0",
        breaks="Any number of first runs share a GPU, however much they slow each other.",
        near=_SHARING_TESTS,
    ),
    Fault(
        id="sharing-any-number-on-one-of-many",
        file="src/gpuyard/policy/sharing.py",
        old="    return durations_with(need, state, limit) > limit.durations + 1e-9\n",
        new="    return False\n",
        breaks="Slow jobs pile up on one GPU while others become free, and all work ends later.",
        near=_SHARING_TESTS,
    ),
)

FAULTS = (*_WHAT_IS_EXPECTED, *_SLOW_DOWN)
