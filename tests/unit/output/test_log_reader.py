"""Progress and figures in texts that people print."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.model.job_progress import MOST_FIGURES
from gpuyard.output.progress_line import LONGEST_NAME, read_line
from gpuyard.output.progress_reader import MOST_LINES, LogReader, advance, drawn_lines
from tests.known import known


def read(*pieces: str) -> tuple[float, float | None, str] | None:
    reader = LogReader()
    for piece in pieces:
        reader, _ = advance(reader, piece)
    amount = reader.amount()
    return None if amount is None else (round(amount.done, 4), amount.total, amount.unit)


def figures(line: str) -> dict[str, float | None]:
    return dict(read_line(line).figures)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("epoch 3/10", (3, 10, "epoch")),
        ("Epoch 3 of 10", (3, 10, "epoch")),
        ("Epoch [3/10], Step [120/400], Loss: 0.5", (2.3, 10, "epoch")),
        ("Epoch: 3/10 | loss: 0.5", (3, 10, "epoch")),
        ("[Epoch 3/10] train loss 0.3", (3, 10, "epoch")),
        ("step 120 of 4000", (120, 4000, "step")),
        ("Step 1,200/4,000", (1200, 4000, "step")),
        ("Iter 120 / 4000", (120, 4000, "iteration")),
        (" iteration      120/    4000 | consumed samples: 480 | lm loss: 1.2E+00 |", (120, 4000, "iteration")),
        ("Processed 120 of 4000 images", (120, 4000, "image")),
        ("[ 40%] Building CXX object foo.o", (40, 100, "%")),
        ("[12/345] Linking foo", (12, 345, "")),
        ("progress: 37.5%", (37.5, 100, "%")),
        ("40% done", (40, 100, "%")),
        ("Train Epoch: 3 [640/1280 (50%)]\tLoss: 2.29", (2.5, None, "epoch")),
        ("Epoch [3][50/100]  lr: 1e-2, eta: 0:01:00, loss: 0.4", (2.5, None, "epoch")),
        ("Epoch 3/10:  50%|█████     | 5/10 [00:01<00:01,  4.9it/s]", (2.5, 10, "epoch")),
        ("fold 2/5\nepoch 5/10: loss=1\n", (1.5, 5, "fold")),
    ],
)
def test_a_text_that_tells_progress_is_read(text: str, expected: tuple[float, float | None, str]) -> None:
    assert read(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "", "accuracy: 91%", "GPU memory 40% used", "2026/11/18 12:30:45 started",
        "2026-11-18 12:30:45 INFO 3/10 tests passed", "epoch 11/10", "step 5/0", "epoch 3/" + "9" * 40,
        "see https://example.org/step 1/2/3", "loaded checkpoint at step 120", "400%|███",
    ],
)  # fmt: skip
def test_other_text_is_no_progress(text: str) -> None:
    assert read(text) is None


def test_epochs_count_with_their_steps() -> None:
    assert read("Epoch 1/4\n") == (0, 4, "epoch")
    assert read("Epoch 1/4\n", "step 5/10\n") == (0.5, 4, "epoch")
    assert read("Epoch 1/4\nstep 10/10\n", "Epoch 2/4\n") == (1, 4, "epoch")
    assert read("epoch 2/4\n", "epoch 3/4\n") == (3, 4, "epoch")
    assert read("epoch 0/4 loss=1\n") == (0, 4, "epoch")
    assert read("epoch 0/4 step 5/10\n", "epoch 1/4 step 5/10\n") == (1.5, 4, "epoch"), "epochs that count from zero"
    lines = [f"epoch {1 + step // 10}/4 step {step}/40 loss=1\n" for step in range(1, 26)]
    assert read(*lines) == (25, 40, "step"), "steps that go on from epoch to epoch count the whole work"


def test_bars_count_from_outside() -> None:
    loading = "\rload: 97%|███▉| 97/100 [00:01<00:00, 90it/s]\n"
    assert read(loading, "\rtrain:  5%|▏| 5/100 [00:01<00:20, 5it/s]") == (5, 100, "step")
    outer = "\rall:  25%|██▌ | 1/4 [00:01<00:03,  1.0s/it]"
    inner = "\n\rone:  50%|█████| 5/10 [00:01<00:01,  5it/s]\x1b[A"
    assert read(outer, inner) == (1.5, 4, "step")
    assert read(outer + inner) == (1.5, 4, "step"), "a bar below another one is inside it"
    reader, _ = advance(LogReader(), "\r 25%|██▌ | 25/100 [00:10<1:00:30,  1.0it/s]")
    assert known(reader.amount()).left_s == 3630, "the time left is that of the outer bar alone"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("epoch 3/10 loss=0.12 acc: 0.91", {"loss": 0.12, "acc": 0.91}),
        ("{'loss': 0.5, 'grad_norm': 1.2e-3, 'epoch': 1.0}", {"loss": 0.5, "grad_norm": 0.0012}),
        ("[3]\tvalidation-rmse:0.48", {"validation-rmse": 0.48}),
        ("iter 120: loss 1.23, time 12.1ms", {"loss": 1.23}),
        ("step 5/10 loss=nan", {"loss": None}),
        ("step 5/10 loss: inf", {"loss": None}),
        ("val_loss: 0.2 host:8080 line 3: 5", {"val_loss": 0.2}),
        ("listening on port: 8080", {}),
        ("elapsed: 12", {}),
        ("  warnings.warn('x'): 3", {}),
    ],
)
def test_named_figures(line: str, expected: dict[str, float | None]) -> None:
    assert figures(line) == expected


def test_what_is_read_is_limited_and_printable() -> None:
    found = figures("epoch 1/2 " + " ".join(f"{'n' * 50}{number}={number}" for number in range(100)))
    assert len(found) <= MOST_FIGURES
    assert all(len(name) <= LONGEST_NAME for name in found), "figures of a line are limited in number and length"
    # An escape sequence in a name does not get through.
    _, escaped = advance(LogReader(), "epoch 1/2 \x1b[31mlo\x1b]0;x\x07ss\x1b[0m=0.5 \u202eacc=1\n")
    assert all(name.isprintable() for line in escaped for name, _ in line)
    lines, _, _ = drawn_lines("".join(f"step {number}/9999\n" for number in range(2000)), 0)
    assert len(lines) == MOST_LINES
    assert lines[-1].text == "step 1999/9999", "a long output is read from its end"


@given(st.lists(st.text(alphabet="0123456789/%|[]<:=. \r\n\x1b\bAKmepochstlanif█━of", max_size=80), max_size=8))
def test_any_text_is_read_without_an_error_and_within_bounds(pieces: list[str]) -> None:
    reader = LogReader()
    for piece in pieces:
        reader, found = advance(reader, piece)
        amount = reader.amount()
        if amount is not None:
            assert amount.done >= 0
            assert amount.total is None or 0 < amount.total <= 1e15
            assert amount.total is None or amount.done <= amount.total
        assert all(len(name) <= LONGEST_NAME and name.isprintable() for line in found for name, _ in line)


RECORDINGS = Path(__file__).parents[2] / "data" / "progress"

# What each program had done in the middle, and in the end: done, total, unit.
MIDDLE = {
    "alive_progress": (5, 10, ""), "click": (50, 100, "%"), "enlighten": (5, 10, "step"),
    "fastprogress": (2.5, 4, "epoch"), "keras": (2 + 1 / 6, 4, "epoch"), "lightning": (2.5, None, "epoch"),
    "lightning_rich": (2.5, 4, "epoch"), "progressbar2": (5, 10, ""), "rich": (50, 100, "%"),
    "rich_nested": (2.5, 4, "epoch"), "tqdm": (5, 10, "step"), "tqdm_nested": (2.5, 4, "epoch"),
    "transformers": (12, 24, "step"),
}  # fmt: skip
SILENT_IN_A_FILE = {"click", "enlighten"}
FIGURES = {
    "keras": {"loss", "mae", "val_loss", "val_mae"}, "lightning": {"train_loss"}, "lightning_rich": {"train_loss"},
    "tqdm": {"acc", "loss"}, "fastprogress": {"loss"},
    "transformers": {"loss", "grad_norm", "learning_rate", "eval_loss", "train_loss"},
}  # fmt: skip


def recording(name: str) -> str:
    return (RECORDINGS / name).read_bytes().decode(errors="replace")


def read_recording(text: str) -> tuple[LogReader, set[str]]:
    reader, figures = advance(LogReader(), text)
    return reader, {name for line in figures for name, _ in line}


@pytest.mark.parametrize("name", MIDDLE)
def test_a_bar_on_a_terminal_is_read_in_the_middle_of_the_work(name: str) -> None:
    amount = known(read_recording(recording(f"{name}.half.txt"))[0].amount())
    assert amount.done == pytest.approx(MIDDLE[name][0])
    assert (amount.total, amount.unit) == MIDDLE[name][1:]


@pytest.mark.parametrize("name", MIDDLE)
@pytest.mark.parametrize("kind", ["pty", "file"])
def test_the_whole_output_is_read_as_done(name: str, kind: str) -> None:
    amount = read_recording(recording(f"{name}.{kind}.txt"))[0].amount()
    if kind == "file" and name in SILENT_IN_A_FILE:
        assert amount is None
        return
    assert amount is not None
    assert (amount.unit, amount.done) == (MIDDLE[name][2], 4 if amount.total is None else amount.total)


@pytest.mark.parametrize("name", FIGURES)
def test_named_figures_are_read(name: str) -> None:
    found = read_recording(recording(f"{name}.half.txt") + "\n")[1] | read_recording(recording(f"{name}.pty.txt"))[1]
    assert found == FIGURES[name]


@pytest.mark.parametrize("name", sorted(MIDDLE.keys() - FIGURES.keys()))
def test_bars_without_figures_have_none(name: str) -> None:
    assert read_recording(recording(f"{name}.pty.txt"))[1] == set()


@pytest.mark.parametrize("name", MIDDLE)
@pytest.mark.parametrize("size", [7, 97, 1000])
def test_output_in_pieces_is_read_as_the_whole(name: str, size: int) -> None:
    text, reader = recording(f"{name}.half.txt"), LogReader()
    for start in range(0, len(text), size):
        reader, _ = advance(reader, text[start : start + size])
    whole = read_recording(text)[0].amount()
    in_pieces = reader.amount()
    assert whole is not None
    assert in_pieces is not None
    assert (in_pieces.done, in_pieces.total) == (whole.done, whole.total)
