"""Faults of batches, pruning, workspaces, rendering manifests and exports."""

from tests.faults.fault import Fault

_RECIPES = "src/gpuyard/recipes"
_TESTS = "tests/unit/recipes"
_CLI = "tests/integration/test_batch_cli.py"
_AGAIN = "test_the_same_command_again_goes_on_with_an_unfinished_batch_and_begins_another_beside_a_finished_one"
_CRASHES = "tests/integration/test_batch_crashes.py"

FAULTS = (
    # Batches
    Fault(
        id="recipes-batch-submitted-before-it-is-recorded",
        file=f"{_RECIPES}/batch.py",
        old="    record = replace(record, parts=(*record.parts, part))\n    _write_record(record)\n",
        new="    record = replace(record, parts=(*record.parts, part))\n",
        breaks="A batch whose command is killed as it submits is submitted a second time, and every seed is run twice.",
        near=(f"{_CRASHES}::test_a_command_that_is_killed_at_any_step_of_its_beginning_is_gone_on_with",),
    ),
    Fault(
        id="recipes-failed-runs-not-resumed",
        file=f"{_RECIPES}/batch.py",
        old='done = {index for index, run in results(record).items() if run["state"] == SUCCEEDED}',
        new='done = {index for index, run in results(record).items() if run["state"] in _ENDS}',
        breaks="--resume leaves out runs that failed.",
        near=(f"{_CLI}::test_resume_runs_only_what_has_not_succeeded",),
    ),
    Fault(
        id="recipes-folder-lock-is-shared",
        file=f"{_RECIPES}/folders.py",
        old="        fcntl.flock(descriptor, fcntl.LOCK_EX)\n",
        new="        fcntl.flock(descriptor, fcntl.LOCK_SH)\n",
        breaks="Two who start the same workspace or batch at once start everything twice.",
        near=(f"{_TESTS}/test_folders.py",),
    ),
    Fault(
        id="recipes-record-can-be-half-written",
        file=f"{_RECIPES}/folders.py",
        old='        with beside.open("wb") as file:\n',
        new='        with (beside := path).open("wb") as file:\n',
        breaks="A full disk or a crash leaves half of a batch's record, and the batch cannot be gone on with.",
        near=(f"{_TESTS}/test_folders.py",),
    ),
    Fault(
        id="recipes-runs-with-frames-are-pruned",
        file=f"{_RECIPES}/run_fate.py",
        old="        if folder.is_dir() and has_frame(folder, plan.frames):\n",
        new="        if folder.is_dir() and not has_frame(folder, plan.frames):\n",
        breaks="Runs with data are moved away, and empty ones stay.",
        near=(f"{_CLI}::test_what_came_out_empty_is_pruned_by_the_scheduler",),
    ),
    Fault(
        id="recipes-cancelled-runs-are-pruned",
        file=f"{_RECIPES}/run_fate.py",
        old='return bool(run["state"] != _CANCELLED and run["attempts"])',
        new="return True",
        breaks="Runs that were cancelled are counted as pruned, and their folders are moved away.",
        near=(f"{_TESTS}/test_run_fate.py",),
    ),
    Fault(
        id="recipes-finished-batch-begun-again-in-its-root",
        file=f"{_RECIPES}/batch_root.py",
        old="        if changed is None and not is_finished:\n",
        new="        if changed is None:\n",
        breaks="The same command after a finished batch runs nothing, and only tells of the old one.",
        near=(f"{_CLI}::{_AGAIN}",),
    ),
    Fault(
        id="recipes-empty-file-counts-as-a-frame",
        file=f"{_RECIPES}/pruning.py",
        old="entry.stat(follow_symlinks=False).st_size > 0",
        new="entry.stat(follow_symlinks=False).st_size >= 0",
        breaks="Runs that made nothing but empty files are kept as data.",
        near=(f"{_TESTS}/test_pruning.py",),
    ),
    Fault(
        id="recipes-move-not-recorded-first",
        file=f"{_RECIPES}/pruning.py",
        old="            self._note(self._moved(target), is_copy=is_copy)\n            try:\n",
        new="            try:\n",
        breaks="A run that was moved just before a crash is nowhere to be found.",
        near=(f"{_TESTS}/test_pruning_crashes.py",),
    ),
    Fault(
        id="recipes-move-over-another-run",
        file=f"{_RECIPES}/pruning.py",
        old="                os.mkdir(target, 0)\n",
        new="",
        breaks="Two batches that prune to one root at once move their runs over each other.",
        near=(f"{_TESTS}/test_pruning_moves.py",),
    ),
    Fault(
        id="recipes-changed-run-is-removed",
        file=f"{_RECIPES}/pruning.py",
        old="            if not _is_whole(pairs):\n",
        new="            if not pairs:\n",
        breaks="What a program writes while its run is copied to another disk is removed unread.",
        near=(f"{_TESTS}/test_pruning_moves.py",),
    ),
    Fault(
        id="recipes-record-line-not-synced",
        file=f"{_RECIPES}/pruning.py",
        old="            text = text[os.write(descriptor, text) :]\n        os.fsync(descriptor)\n",
        new="            text = text[os.write(descriptor, text) :]\n",
        breaks="A power cut leaves runs moved of which the record says nothing.",
        near=(f"{_TESTS}/test_pruning_moves.py",),
    ),
    # Workspaces
    Fault(
        id="recipes-refused-task-loses-its-marker",
        file=f"{_RECIPES}/workspace/files.py",
        old="        if os.path.lexists(aside):\n            aside.replace(marker)\n        raise\n",
        new="        raise\n",
        breaks="A task whose rerun is refused is no longer completed.",
        near=(f"{_TESTS}/workspace/test_files.py",),
    ),
    Fault(
        id="recipes-config-runs-twice-at-once",
        file=f"{_RECIPES}/workspace/sweep.py",
        old='        if task is not None and not task["is_finished"]:\n',
        new='        if task is not None and task["is_live"]:\n',
        breaks="A config that waits is queued again by every start.",
        near=(f"{_TESTS}/workspace/test_sweep.py",),
    ),
    Fault(
        id="recipes-marker-does-not-count",
        file=f"{_RECIPES}/workspace/standing.py",
        old='    if is_marked:\n        return "completed"\n    return "stopped"',
        new='    return "stopped"',
        breaks="A task that wrote its marker and then failed is shown as failed.",
        near=(f"{_TESTS}/workspace/test_standing.py",),
    ),
    Fault(
        id="recipes-record-of-another-attempt",
        file=f"{_RECIPES}/workspace/files.py",
        old="    return record if is_its_own else {}\n",
        new="    return record if isinstance(record, dict) else {}\n",
        breaks="A task is shown with the session and the log of an earlier attempt.",
        near=(f"{_TESTS}/workspace/test_files.py", f"{_TESTS}/workspace/test_standing.py"),
    ),
    Fault(
        id="recipes-configs-in-order-of-characters",
        file=f"{_RECIPES}/workspace/choosing.py",
        old="names = sorted(os.listdir(folder), key=natural)",
        new="names = sorted(os.listdir(folder))",
        breaks="A workspace starts batch10 before batch2.",
        near=(f"{_TESTS}/workspace/test_choosing.py",),
    ),
    Fault(
        id="recipes-two-configs-of-one-name",
        file=f"{_RECIPES}/workspace/names.py",
        old="        known[name] = path\n",
        new="        known[str(path)] = path\n",
        breaks="The configs a.yml and a.yaml write to the same marker and log.",
        near=(f"{_TESTS}/workspace/test_names.py",),
    ),
    # Rendering, exporting
    Fault(
        id="recipes-label-leaves-its-folder",
        file=f"{_RECIPES}/render/names.py",
        old='letter not in "/%"',
        new='letter not in "%"',
        breaks="A label called ../x is written outside of the outputs.",
        near=(f"{_TESTS}/render/test_names.py",),
    ),
    Fault(
        id="recipes-status-file-half-written",
        file=f"{_RECIPES}/render/following.py",
        old="            self._beside.write_bytes(_as_json(status))\n            self._beside.replace(self._path)\n",
        new="            self._path.write_bytes(_as_json(status))\n",
        breaks="Whoever reads the status of a render now and then finds half of it.",
        near=(f"{_TESTS}/render/test_following.py",),
    ),
    Fault(
        id="recipes-stop-before-the-first-label-is-lost",
        file=f"{_RECIPES}/render/following.py",
        old="            is_to_stop = is_to_stop or order is _Order.STOP\n",
        new="            is_to_stop = order is _Order.STOP\n",
        breaks="Ctrl-C while a render is still getting its lease is forgotten.",
        near=(f"{_TESTS}/render/test_following.py",),
    ),
)
