"""Faults of jobs that share a GPU: what is expected of first runs, and how much jobs slow each other."""

from tests.faults.fault import Fault

_MEMORY, _SCHEDULING, _CONTROL = "src/gpuyard/core/memory", "src/gpuyard/core/scheduling", "src/gpuyard/control"
_GAIN, _LONGEST = f"{_SCHEDULING}/sharing_gain.py", f"{_SCHEDULING}/longest_job.py"
_PEAK_TESTS = ("tests/unit/core/memory/test_expected_peak.py",)
_NEWCOMER_TESTS = ("tests/unit/core/memory/test_newcomer.py",)
_GAIN_TESTS = ("tests/unit/core/scheduling/test_sharing_gain.py",)
_LONGEST_TESTS = ("tests/unit/core/scheduling/test_longest_job.py",)
_ADJUST_TESTS = ("tests/unit/control/test_adjust_leases.py",)

_WHAT_IS_EXPECTED = (
    Fault(
        id="sharing-one-run-speaks-for-a-program",
        file=f"{_MEMORY}/expected_peak.py",
        old="_MACHINE_WEIGHT, _PROGRAM_WEIGHT = 4.0, 1.0",
        new="_MACHINE_WEIGHT, _PROGRAM_WEIGHT = 4.0, 0.0",
        breaks="After one small run of a program, all its other runs are packed as if they were as small.",
        near=_PEAK_TESTS,
    ),
    Fault(
        id="sharing-a-flat-second-counts-as-the-peak",
        file=f"{_MEMORY}/expected_peak.py",
        old="    place = bisect_right(FLAT_S, flat_s)\n",
        new="    place = len(FLAT_S)\n",
        breaks="Others join a program that has only loaded its model, and all run out of memory.",
        near=_PEAK_TESTS,
    ),
    Fault(
        id="sharing-late-climbs-are-not-learned",
        file=f"{_MEMORY}/expected_peak.py",
        old="    parts = [max(0.0, peak_mb - level) / peak_mb for level in levels_mb]\n",
        new="    parts = [0.0 for level in levels_mb]\n",
        breaks="A program that takes half of its memory after a minute is packed too closely each time.",
        near=_PEAK_TESTS,
    ),
    Fault(
        id="sharing-runs-of-one-command-count-as-independent",
        file=f"{_MEMORY}/expected_peak.py",
        old="_ALIKE = 0.3\n",
        new="_ALIKE = 0.0\n",
        breaks="An array of a program that needs more than expected runs out of memory as a whole.",
        near=_PEAK_TESTS,
    ),
    Fault(
        id="sharing-old-runs-never-fade",
        file=f"{_MEMORY}/expected_peak.py",
        old="        part = min(1.0, _KEPT_RUNS / (self.count + 1.0))\n",
        new="        part = 1.0\n",
        breaks="What first runs needed a year ago decides what is expected of them today.",
        near=_PEAK_TESTS,
    ),
    Fault(
        id="sharing-what-a-job-holds-is-not-charged",
        file=f"{_MEMORY}/expected_peak.py",
        old="return ExpectedPeak(level_mb + mean * whole,",
        new="return ExpectedPeak(mean * whole,",
        breaks="The lease of a first run reserves less than the job holds.",
        near=_PEAK_TESTS,
    ),
    Fault(
        id="sharing-others-join-a-job-that-is-alone-too-early",
        file=f"{_MEMORY}/newcomer.py",
        old="if not is_measured or self.flat_s < ALONE_FLAT_S or at_most_mb >= device_mb:",
        new="if not is_measured or at_most_mb >= device_mb:",
        breaks='With first_run = "alone", others join a first run as soon as it uses some memory.',
        near=_NEWCOMER_TESTS,
    ),
    Fault(
        id="sharing-leases-change-at-each-sample",
        file=f"{_MEMORY}/newcomer.py",
        old="    return abs(has_mb - had_mb) >= max(_NOTABLE_MB, _NOTABLE_PART * had_mb)\n",
        new="    return has_mb != had_mb\n",
        breaks="Each sample rewrites the lease files of first runs and runs a step of the scheduler.",
        near=_NEWCOMER_TESTS,
    ),
    Fault(
        id="sharing-running-jobs-show-nothing",
        file=f"{_CONTROL}/adjust_leases.py",
        old="            if newcomer.flat_s >= _SHOWN_S:\n",
        new="            if False:\n",
        breaks="An array of a small new program is packed by guesses until its first run has ended.",
        near=_ADJUST_TESTS,
    ),
    Fault(
        id="sharing-a-job-confirms-itself",
        file=f"{_CONTROL}/adjust_leases.py",
        old="            means_mb = _without_one(means_mb, evidence.shown[2].mean_mb)\n",
        new="            pass\n",
        breaks="What is expected of a first run is what it shows itself, so others join it too closely.",
        near=_ADJUST_TESTS,
    ),
)

_SLOW_DOWN = (
    Fault(
        id="sharing-jobs-join-though-all-get-slower",
        file=_GAIN,
        old="        return self.after >= self.before * (1.0 + least) - _ROUNDING\n",
        new="        return True\n",
        breaks="Jobs that each keep a GPU busy share it, and take longer than one after the other.",
        near=_GAIN_TESTS,
    ),
    Fault(
        id="sharing-foreign-load-slows-no-job",
        file="src/gpuyard/core/memory/slowdown.py",
        old="    total = sum([load for load, _ in members]) + foreign_percent\n",
        new="    total = sum([load for load, _ in members])\n",
        breaks="Jobs join a GPU that a program outside gpuyard keeps busy, as if it were idle.",
        near=_GAIN_TESTS,
    ),
    Fault(
        id="sharing-unknown-load-counts-as-none",
        file=_GAIN,
        old="load = min(100.0, UNKNOWN_LOAD_PERCENT + caution * _LOAD_SPREAD)",
        new="load = 0.0",
        breaks="Any number of first runs share a GPU, however much they slow each other.",
        near=_GAIN_TESTS,
    ),
    Fault(
        id="sharing-the-gain-is-only-expected",
        file="src/gpuyard/core/scheduling/device_fit.py",
        old="return 0.0 if packing.depth is None else packing.depth.caution",
        new="return 0.0",
        breaks="All jobs of a burst start at once, ten on one of eight GPUs, and some programs end twice as late.",
        near=("tests/unit/core/scheduling/test_sharing_depth.py",),
    ),
    Fault(
        id="sharing-request-ahead-is-kept-out",
        file=_GAIN,
        old="        if each.is_reservation and not each.share.is_exclusive\n",
        new="        if False\n",
        breaks="Jobs of small load join for ever before the job that waits for the GPU.",
        near=_GAIN_TESTS,
    ),
    Fault(
        id="sharing-longest-job-is-slowed",
        file=_GAIN,
        old="            if factor > 1.0 + NOTICEABLE:\n",
        new="            if factor > 2.0 + NOTICEABLE:\n",
        breaks="The job that decides when all is over takes longer because short ones share its GPU.",
        near=_GAIN_TESTS,
    ),
    Fault(
        id="sharing-faulty-gpu-counts-as-elsewhere",
        file=_GAIN,
        old="if state.device.healthy and not state.foreign.is_over and",
        new="if not state.foreign.is_over and",
        breaks="Jobs wait for a GPU with a fault instead of joining the longest job.",
        near=_GAIN_TESTS,
    ),
    Fault(
        id="sharing-any-longer-job-is-spared",
        file=_LONGEST,
        old=" and left_s >= FAR_LONGER * usual_s",
        new="",
        breaks="Of two GPUs one is kept free of others for every job that is somewhat longer.",
        near=_LONGEST_TESTS,
    ),
    Fault(
        id="sharing-waiting-work-does-not-count",
        file=_LONGEST,
        old="    total_s += found.device_s\n",
        new="",
        breaks="A GPU is kept for one long job though the jobs that wait will take longer.",
        near=_LONGEST_TESTS,
    ),
    Fault(
        id="sharing-overdue-job-counts-as-over",
        file=_LONGEST,
        old="        return left_s if left_s > 0.0 else self.ran_s\n",
        new="        return max(0.0, left_s)\n",
        breaks="A job that takes longer than usual is slowed by short ones.",
        near=_LONGEST_TESTS,
    ),
    Fault(
        id="sharing-own-gpu-counts-as-elsewhere",
        file=_LONGEST,
        old="left_s * (devices - held) >",
        new="left_s * devices >",
        breaks="On a machine with one GPU, nothing shares it with a long job.",
        near=_LONGEST_TESTS,
    ),
)

FAULTS = (*_WHAT_IS_EXPECTED, *_SLOW_DOWN)
