"""From typed options to jobs: every option, every mistake with a message, and arrays, sweeps, lists and tables."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.errors import UserError
from gpuyard.model.dependencies import DependencyKind
from gpuyard.model.job import Job
from gpuyard.model.job_spec import BatchPace, JobSpec, OnReboot, TagSharing
from gpuyard.model.lease import FixedMemory, HostShare, Need, UnknownMemory, WholeDevice
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Vendor
from gpuyard.model.placeholders import ArrayElement
from gpuyard.model.selection import JobSelection
from gpuyard.model.submission import MOST_JOBS, Submission, SubmissionRequest, parse_submission


def submit(*command: str, **options: Any) -> Submission:
    """Parse options as a user types them, with `_` for `-`."""
    typed = {name.replace("_", "-"): value for name, value in options.items()}
    return parse_submission(
        SubmissionRequest(cwd="/data", environment={"HOME": "/home/me"}, command=command or ("true",), options=typed)
    )


def listed(text: str) -> list[ArrayElement]:
    return list(parse_submission(SubmissionRequest(cwd="/", environment={}, list=text)).elements)


def tabled(text: str) -> list[ArrayElement]:
    return list(
        parse_submission(SubmissionRequest(cwd="/", environment={}, table=text, command=("run", "{lr}"))).elements
    )


def argv_of(element: ArrayElement, *command: str) -> tuple[str, ...]:
    spec = JobSpec(command=command, cwd="/", environment={}, need=Need())
    return Job(
        id=1, spec=spec, state=JobState.QUEUED, priority=0, user="u", submitted_at=0.0,
        index=element.index, values=element.values, command=element.command,
    ).argv  # fmt: skip


def test_a_plain_command_is_one_job_alone_on_one_gpu() -> None:
    submission = submit("python", "train.py")
    assert submission.spec == JobSpec(
        command=("python", "train.py"), cwd="/data", environment={"HOME": "/home/me"}, need=Need(memory=UnknownMemory())
    )
    assert (submission.count, list(submission.elements), submission.priority) == (1, [ArrayElement()], 0)
    assert not submission.is_held
    assert not submission.dependencies


def test_declared_amounts_and_numbers() -> None:
    spec = submit(ram="8G", cpus="4", min_free_mem_mb="100").spec
    assert (spec.need.host, spec.need.min_host_memory_mb) == (HostShare(ram_mb=8192.0, cpus=4.0), 100.0)
    assert spec.cpus == 4
    assert submit().spec.need.host is None, "RAM and CPUs are reserved while free RAM is only a limit"
    assert not submit(vram="8G").spec.need.is_exclusive
    alone = submit(vram="8G", exclusive=True).spec.need
    assert alone.memory == WholeDevice(8192.0), "declared memory is shared unless exclusive"
    # Numbers may come as numbers.
    submission = submit(gpus=0, retries=3, max_cpu=50)
    assert (submission.spec.need.devices, submission.spec.retries, submission.spec.need.max_cpu_percent) == (0, 3, 50.0)


def test_every_option_reaches_the_job() -> None:
    submission = submit(
        gpus="2", vram="8G", vendor="nvidia", gpu_name="H100", device="0, GPU-abc,", linked=True,
        same_node=True,
        max_gpu="80", max_power_w="250.5", max_gpu_mem_mb="100", max_cpu="90", min_free_mem_mb="2048",
        priority="-3", name="big", tag="night", retries="2", time_limit="4h", grace="0", duration="30m",
        on_reboot="fail", stdin="in.txt", log_cap="1G", env=["A=1", "B=x=y", "HOME=/elsewhere"], hold=True,
    )  # fmt: skip
    assert submission.spec == JobSpec(
        command=("true",),
        cwd="/data",
        environment={"HOME": "/elsewhere", "A": "1", "B": "x=y"},
        need=Need(
            devices=2, memory=FixedMemory(8192.0), vendor=Vendor.NVIDIA, model="H100", is_linked=True,
            is_on_one_node=True, max_utilization_percent=80.0, max_power_w=250.5, max_memory_used_mb=100.0,
            max_cpu_percent=90.0, min_host_memory_mb=2048.0,
        ),
        name="big",
        tag="night",
        retries=2,
        time_limit_s=14400.0,
        grace_s=0.0,
        duration_s=1800.0,
        on_reboot=OnReboot.FAIL,
        stdin="in.txt",
        log_cap_mb=1024.0,
    )  # fmt: skip
    assert (submission.priority, submission.is_held, submission.devices) == (-3, True, ("0", "GPU-abc"))


def test_dependencies_of_all_kinds_are_combined() -> None:
    submission = submit(after=["1-3", "name=prep"], after_any="7", after_failed=["9"])
    assert submission.dependencies == (
        (DependencyKind.OK, JobSelection(ranges=((1, 3),))),
        (DependencyKind.OK, JobSelection(names=("prep",))),
        (DependencyKind.ANY, JobSelection(ranges=((7, 7),))),
        (DependencyKind.FAILED, JobSelection(ranges=((9, 9),))),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": "two"}, "--gpus takes a whole number, not 'two'"),
        ({"gpus": "1.5"}, "--gpus takes a whole number, not '1.5'"),
        ({"gpus": "-1"}, "--gpus -1 is out of range"),
        ({"gpus": "1025"}, "--gpus 1025 is out of range"),
        ({"gpus": True}, "--gpus takes one value"),
        ({"gpus": ["1", "2"]}, "--gpus takes one value"),
        ({"notify": [["failed"]]}, "--notify takes a value, or a list of them"),
        ({"gpus": "0", "vram": "8G"}, "--gpus 0 asks for no GPU, and other options for one"),
        ({"gpus": "0", "exclusive": True}, "--gpus 0 asks for no GPU, and other options for one"),
        ({"gpus": "0", "device": "1"}, "--gpus 0 asks for no GPU, and other options for one"),
        ({"vram": "8 gigs"}, "'8 gigs' is not a size"),
        ({"vram": "0"}, "--vram 0 is out of range"),
        ({"log_cap": "9" * 400}, f"--log-cap {'9' * 400} is out of range"),
        ({"vendor": "voodoo"}, "--vendor cannot be 'voodoo'"),
        ({"max_gpu": "high"}, "--max-gpu takes a number, not 'high'"),
        ({"max_power_w": "-1"}, "--max-power-w -1 is out of range"),
        ({"max_cpu": "nan"}, "--max-cpu nan is out of range"),
        ({"min_free_mem_mb": "inf"}, "--min-free-mem-mb inf is out of range"),
        ({"priority": "high"}, "--priority takes a whole number, not 'high'"),
        ({"priority": "1000001"}, "--priority 1000001 is out of range"),
        ({"retries": "-1"}, "--retries -1 is out of range"),
        ({"time_limit": "soon"}, "'soon' is not a time"),
        ({"time_limit": "0s"}, "--time-limit must be longer than 0 s"),
        ({"duration": "0"}, "--duration must be longer than 0 s"),
        ({"grace": "-1"}, "'-1' is not a time"),
        ({"on_reboot": "pray"}, "--on-reboot cannot be 'pray'"),
        ({"name": "two words"}, "--name takes a word without spaces, commas and equals signs"),
        ({"name": "a,b"}, "--name takes a word without"),
        ({"tag": "a=b"}, "--tag takes a word without"),
        ({"tag": "a\nb"}, "--tag takes a word without"),
        ({"tag": "caf\udce9"}, "--tag takes a word without"),
        ({"name": "x" * 101}, "--name takes a word without"),
        ({"env": ["LR"]}, "--env takes NAME=VALUE"),
        ({"env": ["=3"]}, "--env takes NAME=VALUE"),
        ({"after": "last"}, "'last' names no job"),
        ({"hold": "no"}, "--hold takes no value"),
        ({"vrma": "8G"}, "there is no option 'vrma'"),
        ({"concurrency": "0"}, "--concurrency 0 is out of range"),
        ({"concurrency": "six"}, "--concurrency takes a whole number, not 'six'"),
        ({"concurrency": "2", "stagger": "soon"}, "'soon' is not a time"),
        ({"concurrency": "2", "run_ram": "lots"}, "'lots' is not a size"),
        ({"concurrency": "2", "array": "0-9"}, "a batch is no array"),
        ({"steady": "2s"}, "--steady is an option of a batch"),
        ({"stagger": "2s"}, "--stagger is a pause between the starts of several jobs"),
        ({"at": "noon"}, "'noon' is not a time"),
    ],
)
def test_an_invalid_value_is_reported_with_its_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        submit(**options)
    assert caught.value.message.startswith(message)


def test_mistakes_quote_no_secrets_and_name_choices() -> None:
    with pytest.raises(UserError) as caught:
        submit(vendor="voodoo")
    assert caught.value.hint == "it can be nvidia, amd, intel, apple, simulated"
    with pytest.raises(UserError) as caught:
        submit(env=["hunter2"])
    assert "hunter2" not in f"{caught.value.message}{caught.value.hint}", "a mistyped variable is not quoted"
    spec = submit("python", "a.py", env=["TOKEN=hunter2"]).spec
    assert "hunter2" not in repr(spec)
    assert "python a.py" in repr(spec), "a spec does not show its environment"


def test_a_submission_needs_a_folder_and_one_kind_of_command() -> None:
    with pytest.raises(UserError, match="'data' is not an absolute path"):
        parse_submission(SubmissionRequest(cwd="data", environment={}, command=("true",)))
    # A submission without a command is refused.
    with pytest.raises(UserError, match="there is no program to run"):
        parse_submission(SubmissionRequest(cwd="/", environment={}))
    with pytest.raises(UserError, match="there is no program to run"):
        parse_submission(SubmissionRequest(cwd="/", environment={}, table="lr\n1\n"))
    with pytest.raises(UserError, match="a list of commands goes with no program"):
        parse_submission(SubmissionRequest(cwd="/", environment={}, list="true", command=("true",)))
    # Arrays sweeps and lists cannot be combined.
    with pytest.raises(UserError, match="--array and --sweep do not go together"):
        submit(array="0-3", sweep=["a=1"])
    with pytest.raises(UserError, match="--sweep and --from do not go together"):
        parse_submission(
            SubmissionRequest(cwd="/", environment={}, table="a\n1\n", command=("true",), options={"sweep": ["b=1"]})
        )


@pytest.mark.parametrize(
    ("text", "indexes", "limit"),
    [
        ("0-3", [0, 1, 2, 3], None), ("0-99:25", [0, 25, 50, 75], None),
        ("0-99:5%3", list(range(0, 100, 5)), 3), ("7-7", [7], None), (" 1-2%9 ", [1, 2], 9),
    ],
)  # fmt: skip
def test_an_array_has_a_job_for_each_index(text: str, indexes: list[int], limit: int | None) -> None:
    submission = submit(array=text)
    assert [element.index for element in submission.elements] == indexes
    assert (submission.count, submission.group_limit, submission.spec.is_array) == (len(indexes), limit, True)


@pytest.mark.parametrize("text", ["5", "a-b", "0-9:", "0-9%", "-1-3", "0-9:2:2", "0-9%3:2", "1" * 10 + "-2"])
def test_an_invalid_array_range_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is not a range for --array"):
        submit(array=text)


@pytest.mark.parametrize("text", ["9-0", "0-9:0", "0-9%0"])
def test_an_empty_array_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is an empty range for --array"):
        submit(array=text)


def test_a_sweep_has_a_job_for_each_combination() -> None:
    submission = submit("train", "{lr}", "{seed}", sweep=["lr=1e-3,1e-4", "seed=0-2,7"])
    elements = list(submission.elements)
    assert (submission.count, submission.spec.is_array) == (8, True)
    filled = [argv_of(element, *submission.spec.command)[1:] for element in elements]
    assert filled == [(lr, seed) for lr in ("1e-3", "1e-4") for seed in ("0", "1", "2", "7")]


def test_sweeps_may_be_single_and_are_checked() -> None:
    assert [element.values for element in submit("run", "{lr}", sweep="lr=1,2").elements] == [{"lr": "1"}, {"lr": "2"}]
    # A sweep rejects repeated names and reversed ranges.
    with pytest.raises(UserError, match="'lr=2' is not a sweep"):
        submit(sweep=["lr=1", "lr=2"])
    with pytest.raises(UserError, match="'9-2' is not a range that can be swept"):
        submit(sweep=["seed=9-2"])


@pytest.mark.parametrize("text", ["lr", "lr=", "=1", "2lr=1", "l-r=1"])
def test_an_invalid_sweep_is_quoted(text: str) -> None:
    with pytest.raises(UserError, match=f"'{text}' is not a sweep"):
        submit(sweep=[text])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"array": f"0-{MOST_JOBS}"}, id="array"),
        pytest.param({"sweep": ["a=0-99999", "b=0-99999", "c=0-99999"]}, id="sweep"),
        pytest.param({"sweep": ["a=" + ",".join(["0-999999"] * 1000)]}, id="one long axis"),
    ],
)
def test_too_many_jobs_are_refused_before_they_are_created(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="jobs at once are too many") as caught:
        submit(**options)
    assert str(caught.value.hint).startswith("submit at most 1,000,000")
    assert ("--sample" in str(caught.value.hint)) == ("sweep" in options)


def test_lists_and_tables_have_a_job_on_each_line() -> None:
    found = listed("# first\npython a.py --x 'two words'\r\n\n   python b.py\n#last")
    assert [element.command for element in found] == [("python", "a.py", "--x", "two words"), ("python", "b.py")]
    assert listed("run a\x0cb\u2028c")[0].command == ("run", "a\x0cb\u2028c"), "only a new line ends a command"
    # An open quote is reported with its line.
    with pytest.raises(UserError, match="'run \"a' cannot be split into arguments"):
        listed('run "a')
    # A table has a job on each line.
    found = tabled('lr, note\n1,"a, b"\n\n2,\n')
    assert [element.values for element in found] == [{"lr": "1", "note": "a, b"}, {"lr": "2", "note": ""}]
    assert tabled("\ufefflr\n1\n") == [ArrayElement(values={"lr": "1"})]
    assert listed("\ufefftrue")[0].command == ("true",), "a byte order mark is not part of the first name"


@pytest.mark.parametrize(
    "line",
    [
        "a | b", "a && b", "a; b", "a > out", "a < in", "echo $HOME", "echo `id`", "ls *.py", "ls ?", "ls [ab]",
        "echo {1..3}", "(cd x)", "echo a\\ b", "A=1 run", "cp ~/x .", "echo {a,b}", "run # note", "! run",
    ],
)  # fmt: skip
def test_a_line_with_shell_syntax_runs_in_a_shell(line: str) -> None:
    assert listed(line) == [ArrayElement(command=("/bin/sh", "-c", line))]


@pytest.mark.parametrize(
    "line", ["run --lr=1e-3", "run a,b:c@d%e+f^g", 'run "a b"', "run -x /p/q.r_s", "run --lr {lr}"]
)
def test_a_line_of_plain_arguments_needs_no_shell(line: str) -> None:
    assert listed(line)[0].command is not None
    assert listed(line)[0].command[0] == "run"  # type: ignore[index]


@pytest.mark.parametrize("text", ["", "\n\n", "# only a note\n"])
def test_a_list_without_commands_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="the file has no command in it"):
        listed(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr,seed\n1,2\n3\n", "line 3 of the CSV file has 1 values for 2 columns"),
        ("lr\n1,2\n", "line 2 of the CSV file has 2 values for 1 columns"),
        ("lr,lr\n1,2\n", "the CSV file's first line has to name its columns"),
        ("1,2\n3,4\n", "the CSV file's first line has to name its columns"),
        ("", "the CSV file's first line has to name its columns"),
        ("lr\n", "the CSV file has no values in it"),
        ('lr\n"open\n', "line 2 of the CSV file: unexpected end of data"),
    ],
)
def test_an_invalid_table_is_reported_with_its_line(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        tabled(text)
    assert caught.value.message == message


def test_placeholders_are_filled_in_and_other_braces_stay() -> None:
    assert argv_of(ArrayElement(index=7), "run", "--out=part-{index}-{index}", "{index}") == (
        "run",
        "--out=part-7-7",
        "7",
    )
    words = ("awk", "{print $1}", "{seed}", "{}", "{index }")
    assert argv_of(ArrayElement(index=1), *words) == words
    assert argv_of(ArrayElement(), "{index}") == ("{index}",), "braces that name no placeholder stay"


@given(st.dictionaries(st.sampled_from("abc"), st.sampled_from(["{a}", "{b}", "{c}", "x", "\\1"]), min_size=1))
def test_a_value_that_looks_like_a_placeholder_is_not_replaced(values: dict[str, str]) -> None:
    command = [f"-{{{name}}}-" for name in values]
    assert argv_of(ArrayElement(values=values), *command) == tuple(f"-{value}-" for value in values.values())


def test_tag_sharing_needs_a_tag() -> None:
    sharing = TagSharing(most_per_device=2)
    request = SubmissionRequest(cwd="/", command=("run",), options={"tag": "w"}, tag_sharing=sharing)
    assert parse_submission(request).spec.tag_sharing == sharing
    with pytest.raises(UserError, match="`tag_sharing` is the rule of a tag"):
        parse_submission(replace(request, options={}))


def test_the_options_of_a_batch_are_its_concurrency_and_the_bounds_of_its_gates() -> None:
    submission = submit(
        "sim", "{seed}", concurrency="6", sweep=["seed=0-9"], gpus="1", vram="2G", max_cpu="85",
        min_free_mem_mb="2048", max_gpu="80", max_gpu_mem_mb="8000", run_ram="1.5G", smoothing="4s", steady="2s",
        stagger="500ms", sample_log="/data/samples.csv",
    )  # fmt: skip
    assert (submission.count, submission.group_limit, submission.spec.is_array) == (10, 6, True)
    assert submission.spec.pace == BatchPace(
        max_cpu_percent=85.0, min_free_memory_mb=2048.0, max_gpu_percent=80.0, max_gpu_memory_mb=8000.0,
        run_ram_mb=1536.0, smoothing_s=4.0, steady_s=2.0, stagger_s=0.5, sample_log="/data/samples.csv",
    )  # fmt: skip
    assert submission.spec.need == Need(memory=FixedMemory(2048.0), host=HostShare(ram_mb=1536.0))


def test_what_is_a_batch() -> None:
    elements = list(submit(concurrency="2", sweep=["index=3-4"]).elements)
    assert [(element.index, element.values) for element in elements] == [(3, {"index": "3"}), (4, {"index": "4"})]
    assert [element.index for element in submit(concurrency="2", sweep=["seed=3-4"]).elements] == [None, None]
    assert [element.index for element in submit("run", "{index}", sweep=["index=3-4"]).elements] == [None, None]
    submission = submit(concurrency=1)
    assert submission.spec.pace == BatchPace(), "a batch without bounds has no gates but its concurrency"
    assert (submission.count, submission.group_limit, submission.spec.is_array) == (1, 1, True)
    # Smoothing steadiness and stagger can be switched off.
    pace = submit(concurrency="2", smoothing="0", steady="0", stagger="0").spec.pace
    assert pace == BatchPace(smoothing_s=0.0, steady_s=0.0, stagger_s=0.0)
    spec = submit(max_cpu="85", max_gpu="80").spec
    assert spec.pace is None, "a single job has bounds of its own and no pace"
    assert (spec.need.max_cpu_percent, spec.need.max_utilization_percent) == (85.0, 80.0)
    # A run that could never start under its own bound is refused.
    with pytest.raises(UserError, match=r"takes 8192 MB of a GPU .* no more than 8000 MB may be used") as caught:
        submit(concurrency="2", vram="8G", max_gpu_mem_mb="8000")
    assert caught.value.hint == "raise --max-gpu-mem-mb, or no run can ever start"
    assert submit(concurrency="2", vram="8000M", max_gpu_mem_mb="8000").spec.pace is not None


@pytest.mark.parametrize(
    ("options", "is_so"),
    [
        ({"concurrency": "2"}, True), ({"concurrency": "2", "gpus": "1"}, False),
        ({"concurrency": "2", "device": "0"}, False), ({}, False),
    ],
)  # fmt: skip
def test_only_a_batch_without_device_options_may_run_without_devices(options: dict[str, Any], is_so: bool) -> None:
    assert submit(**options).devices_are_optional is is_so
