"""Recognise programs that ran out of memory among those that failed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.model.out_of_memory import RamLimit, Shortage, ShortageKind, ended_at_limit, killed_by_kernel, recognise
from tests.known import known
from tests.unit.policy.oom_samples import ARENA, FIGURES, GB, HOST, NOTICE, OTHER, PYTORCH, PYTORCH_OLD, WORDS

CHAINED = "During handling of the above exception, another exception occurred:"
CAUSED = "The above exception was the direct cause of the following exception:"


def traceback(error: str) -> str:
    return (
        f'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    step()\n    ^^^^^^\n{error}\n'
    )


@pytest.mark.parametrize(("line", "expected"), FIGURES, ids=lambda value: value[:30] if isinstance(value, str) else "")
def test_the_numbers_are_those_of_the_message(line: str, expected: Shortage) -> None:
    shortage = known(recognise(f"epoch 1\n{line}\n"))
    assert line.startswith(shortage.says.removesuffix("…"))
    assert replace(shortage, says="") == expected


@pytest.mark.parametrize(("line", "where", "framework"), WORDS)
def test_it_is_known_by_its_words(line: str, where: ShortageKind, framework: str | None) -> None:
    shortage = known(recognise(f"epoch 1\n{line}\nsome last words\n"))
    assert (shortage.where, shortage.framework, shortage.says) == (where, framework, " ".join(line.split()))


@pytest.mark.parametrize("line", OTHER)
def test_other_failures_are_not_taken_for_it(line: str) -> None:
    assert recognise(f"epoch 1\n{line}\n") is None


@pytest.mark.parametrize("date", ["May 12 10:00:01", "[Tue May 12 10:00:01 2026]"])
def test_a_month_is_no_talk(date: str) -> None:
    assert recognise(f"{date} RuntimeError: CUDA error: out of memory") is not None


def test_numbers_are_taken_from_the_last_error_or_just_before_it() -> None:
    shortage = known(recognise(f"{PYTORCH_OLD}\nretrying with half the batch\n{traceback(PYTORCH)}"))
    assert shortage.asked_mb == 20 * GB, "the last one counts"
    shortage = known(recognise(f"{ARENA}\nCUDA error: out of memory\nRuntimeError: CUDA error: out of memory\n"))
    assert shortage.says == "RuntimeError: CUDA error: out of memory"
    assert shortage.asked_mb == 1 * GB, "a line without numbers uses those just before it"
    shortage = known(recognise(f"{PYTORCH}\nMemoryError\n"))
    assert (shortage.where, shortage.asked_mb) == (HOST, None), "it borrows none from the other memory"
    shortage = known(recognise(f"{'x' * 5000} \x1b[31m\t{PYTORCH}"))
    assert len(shortage.says) <= 300
    assert "Tried to allocate 20.00 GiB" in shortage.says
    assert shortage.says.isprintable(), "the quoted line is short and contains the match"


def test_an_error_may_be_survived() -> None:
    steps = "".join(f"step {step}\n" for step in range(200))
    assert recognise(f"{PYTORCH}\n{steps}") is None
    assert recognise(f"{PYTORCH}\n{steps[:400]}") is not None, "an error long before the end was survived"
    assert recognise(f"{NOTICE}\n{traceback('RuntimeError: shapes do not match')}") is None
    assert recognise(f"{NOTICE}\n") is not None, "an allocator that tried with less is taken back by any error"
    bar = "\r".join(f"{percent}%|##" for percent in range(50))
    assert recognise(f"{bar}{traceback(PYTORCH)}") is not None, "a progress bar on the same line does not matter"


@pytest.mark.parametrize(
    "error",
    ["ValueError: bad config", "KeyError: 'loss'", "KeyboardInterrupt", "json.decoder.JSONDecodeError: Extra data"],
)
def test_a_later_error_of_another_kind_means_that_it_was_survived(error: str) -> None:
    assert recognise(f"{traceback(PYTORCH)}skipping this batch\n{traceback(error)}") is None
    assert (
        recognise(f"[rank0]: {PYTORCH}\n" + "".join(f"[rank0]: {line}\n" for line in traceback(error).split("\n")))
        is None
    )


@pytest.mark.parametrize(
    "error",
    [
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 1.",
        "RuntimeError: Engine core initialization failed. See root cause above.",
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.",
    ],
)
def test_a_launcher_that_tells_of_the_death_does_not_hide_it(error: str) -> None:
    assert known(recognise(f"{traceback(PYTORCH)}{traceback(error)}")).asked_mb == 20 * GB


@pytest.mark.parametrize(
    "link", [CHAINED, CAUSED, "Exception ignored in: <function Pool.__del__>", "Exception in thread T1:"]
)
def test_an_error_that_came_of_it_does_not_hide_it(link: str) -> None:
    assert recognise(f"{traceback(PYTORCH)}\n{link}\n\n{traceback('ValueError: no result')}") is not None


@pytest.mark.parametrize("end", ["", '  File "train.py", line 3', "100%|####| 3/3"])
def test_a_traceback_without_its_end_takes_nothing_back(end: str) -> None:
    assert recognise(f"{PYTORCH}\nTraceback (most recent call last):\n{end}") is not None


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        "jaxlib.xla_extension.XlaRuntimeError: FAILED_PRECONDITION: DNN library initialization failed.",
        "ValueError: Failed to load model from file: model.gguf",
    ],
)
def test_an_unsure_error_counts_where_an_allocation_had_failed(error: str) -> None:
    assert recognise(f"{NOTICE}\n{traceback(error)}") is not None
    assert recognise(traceback(error)) is None


@pytest.mark.parametrize(
    "tag", ["[rank3]: ", "[default0]:", "(train pid=17) ", "\x1b[36m(f pid=17, ip=10.0.0.1)\x1b[0m "]
)
def test_prefixes_of_launchers_do_not_matter(tag: str) -> None:
    assert recognise(f"{tag}MemoryError\n") is not None


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: CUDA out of memory. Tried to allocate more than 1EB memory.",
        "RuntimeError: CUDA out of memory. Tried to allocate 5 \N{KELVIN SIGN}iB.",
        "RuntimeError: CUDA out of memory. Tried to allocate 17592186044416.00 GiB.",
        ARENA.replace("1073741824", "4585490524328388608"),
        "OOM when allocating tensor with shape[999999999,999999999,999999999] and type float on device:GPU:0",
        "OOM when allocating tensor with shape[1,2] and type resource on device:GPU:0",
        "Free memory on device (1/2 GiB) on startup is less than desired GPU memory utilization (0.9, ? GiB)",
    ],
)
def test_an_absurd_figure_is_no_figure(line: str) -> None:
    assert known(recognise(line)).asked_mb is None


@given(st.text(max_size=2000))
def test_any_text_is_borne(text: str) -> None:
    shortage = recognise(text)
    assert shortage is None or len(shortage.says) <= 300


PIECES = [line for line, *_ in WORDS] + [line for line, _ in FIGURES] + [CHAINED, "\n", "\r", "\x1b[1m", "[rank0]: "]


@given(st.lists(st.sampled_from([*PIECES, *OTHER, traceback("ValueError: x"), "1.2.3 GiB", "9" * 400]), max_size=12))
def test_any_mixture_of_messages_is_borne(pieces: list[str]) -> None:
    shortage = recognise("".join(pieces))
    assert shortage is None or shortage.says


HOSTILE = [
    ("a" * 65536, False), ("cuda " * 13000, False), ("out of memory " * 4600, False),
    ("CUDA out of memory " * 3400, False), ("Traceback (most recent call last):\n" * 1800, False),
    ("OOM when allocating tensor " * 2400, True), ("failed to allocate " * 3400, False),
    ("RESOURCE_EXHAUSTED: " * 3200, False), ("Error: out of GPU " * 3600, False),
    ("alloc 1," + "1," * 32768, False), ("allocate 1,111" * 4600, False), ("alloc " + "\x1b[" * 32768, False),
    ("NCCL WARN out of " * 3800, False), ("cudaMalloc" * 6500, False), ("out of" + " " * 65536, False),
    ("MemoryError" + " " * 65536 + ".", False), ("\n" * 65536, False), ((PYTORCH + " ") * 120, True),
]  # fmt: skip


# A pattern that went quadratic would take minutes.
@pytest.mark.timeout(20)
@pytest.mark.parametrize(("text", "is_shortage"), HOSTILE, ids=lambda value: repr(value)[:16])
def test_hostile_text_does_not_take_for_ever(text: str, is_shortage: bool) -> None:
    assert (recognise(text) is not None) is is_shortage


def test_a_kill_for_want_of_memory() -> None:
    shortage = killed_by_kernel(137, 4, 5, 900.0, 16384.0)
    assert shortage is not None, "a kill that the kernel counted is for want of memory"
    assert (shortage.where, shortage.held_mb, shortage.total_mb, shortage.framework) == (
        HOST,
        900.0,
        16384.0,
        "the kernel",
    )
    # A kill of a program that held nearly all memory is out of memory.
    for before, after in [(None, None), (4, None), (4, 4)]:
        shortage = known(killed_by_kernel(137, before, after, 15000.0, 16384.0))
        assert shortage.where is HOST
    assert ended_at_limit(None) is None
    assert ended_at_limit(RamLimit(limit_mb=200.0)) is None
    found = known(ended_at_limit(RamLimit(limit_mb=200.0, kills=2, peak_mb=199.0)))
    assert (found.where, found.total_mb, found.held_mb) == (ShortageKind.HOST, 200.0, 199.0)
    assert "its limit of RAM (--ram)" in found.says, "an end at the own limit is told apart from a full machine"


@pytest.mark.parametrize(
    ("status", "before", "after", "peak_mb", "total_mb"),
    [
        (137, None, None, None, None), (137, 4, 4, 900.0, 16384.0), (137, None, 5, 900.0, 16384.0),
        (137, 5, 4, None, None), (137, None, None, 900.0, None), (137, None, None, 900.0, 0.0),
        (1, 4, 5, 16000.0, 16384.0), (139, 4, 5, 16000.0, 16384.0), (None, 4, 5, 16000.0, 16384.0),
    ],
)  # fmt: skip
def test_without_evidence_a_kill_is_only_a_kill(
    status: int | None, before: int | None, after: int | None, peak_mb: float | None, total_mb: float | None
) -> None:
    assert killed_by_kernel(status, before, after, peak_mb, total_mb) is None
