"""Progress read from what real tools printed. `scripts/record-progress` made the recordings."""

from pathlib import Path

import pytest

from gpuyard.output.progress_reader import LogReader, advance

RECORDINGS = Path(__file__).parents[2] / "data" / "progress"

# What each program had done in the middle, and in the end: done, total, unit.
MIDDLE = {
    "alive_progress": (5, 10, ""),
    "click": (50, 100, "%"),
    "enlighten": (5, 10, "step"),
    "fastprogress": (2.5, 4, "epoch"),
    "keras": (2 + 1 / 6, 4, "epoch"),
    "lightning": (2.5, None, "epoch"),
    "lightning_rich": (2.5, 4, "epoch"),
    "progressbar2": (5, 10, ""),
    "rich": (50, 100, "%"),
    "rich_nested": (2.5, 4, "epoch"),
    "tqdm": (5, 10, "step"),
    "tqdm_nested": (2.5, 4, "epoch"),
    "transformers": (12, 24, "step"),
}
SILENT_IN_A_FILE = {"click", "enlighten"}
FIGURES = {
    "keras": {"loss", "mae", "val_loss", "val_mae"},
    "lightning": {"train_loss"},
    "lightning_rich": {"train_loss"},
    "tqdm": {"acc", "loss"},
    "fastprogress": {"loss"},
    "transformers": {"loss", "grad_norm", "learning_rate", "eval_loss", "train_loss"},
}


def recording(name: str) -> str:
    return (RECORDINGS / name).read_bytes().decode(errors="replace")


def read(text: str) -> tuple[LogReader, set[str]]:
    reader, figures = advance(LogReader(), text)
    return reader, {name for line in figures for name, _ in line}


@pytest.mark.parametrize("name", MIDDLE)
def test_a_bar_on_a_terminal_is_read_in_the_middle_of_the_work(name: str) -> None:
    amount = read(recording(f"{name}.half.txt"))[0].amount()
    assert amount is not None
    assert amount.done == pytest.approx(MIDDLE[name][0])
    assert (amount.total, amount.unit) == MIDDLE[name][1:]


@pytest.mark.parametrize("name", MIDDLE)
@pytest.mark.parametrize("kind", ["pty", "file"])
def test_the_whole_output_is_read_as_done(name: str, kind: str) -> None:
    amount = read(recording(f"{name}.{kind}.txt"))[0].amount()
    if kind == "file" and name in SILENT_IN_A_FILE:
        assert amount is None
        return
    assert amount is not None
    assert amount.unit == MIDDLE[name][2]
    assert amount.done == (4 if amount.total is None else amount.total)


@pytest.mark.parametrize("name", FIGURES)
def test_named_figures_are_read(name: str) -> None:
    found = read(recording(f"{name}.half.txt") + "\n")[1] | read(recording(f"{name}.pty.txt"))[1]
    assert found == FIGURES[name]


@pytest.mark.parametrize("name", sorted(MIDDLE.keys() - FIGURES.keys()))
def test_bars_without_figures_have_none(name: str) -> None:
    assert read(recording(f"{name}.pty.txt"))[1] == set()


@pytest.mark.parametrize("name", MIDDLE)
@pytest.mark.parametrize("size", [7, 97, 1000])
def test_output_in_pieces_is_read_as_the_whole(name: str, size: int) -> None:
    text, reader = recording(f"{name}.half.txt"), LogReader()
    for start in range(0, len(text), size):
        reader, _ = advance(reader, text[start : start + size])
    whole = read(text)[0].amount()
    in_pieces = reader.amount()
    assert whole is not None
    assert in_pieces is not None
    assert (in_pieces.done, in_pieces.total) == (whole.done, whole.total)
