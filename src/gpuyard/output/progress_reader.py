"""Follows the progress of a program through its output, piece by piece.

Lines count different things, one inside another: the steps of an epoch, the epochs of a fold, a bar that is drawn below
another one. The outermost level is the progress, and what the levels inside have done since it last changed is added:
epoch 3 of 10 with half of its steps done is 2.5 of 10 epochs.
- Rows are those of an imagined terminal: a carriage return starts a line anew, `ESC[A` goes back up to a bar, and what
is below it then is inside it.
- A count that goes on when the level above it moves on counts the whole work: it is the progress by itself.
- Of several bars one after the other, the last one counts; of a bar that is drawn again and again, the last drawing."""

import itertools
import re
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.model.job_progress import WorkDone
from gpuyard.output.progress_line import Count, LineReading, read_line

MOST_LINES = 400
LONGEST_LINE = 1000
_BREAK = re.compile("(\r?\n|\r|\b+|\x1b\\[\\d*A|\x1b\\[[\\d;]*[Hf])")
_ESCAPE = re.compile("\x1b(?:\\[[0-?]*[ -/]*[@-~]|[\\]P^_][^\x07\x1b]*(?:\x07|\x1b\\\\)?|[@-OQ-Z\\\\78=>])")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f]")


class DrawnLine(Struct, frozen=True):
    """A line without colours. `moves_up_to` is the row to which the cursor went back after it, or None."""

    text: str
    row: int
    moves_up_to: int | None = None


def drawn_lines(text: str, row: int) -> tuple[list[DrawnLine], int, str]:
    """Return the last drawn lines of a text that begins in `row`, the row of its last line, and that line as it is:
    more may be written to it. Of a line that is drawn again and again in place, the last drawing alone counts."""
    lines: list[DrawnLine] = []
    last = ""
    for number, piece in enumerate(_BREAK.split(text)):
        if piece and number % 2 == 0:
            last = piece
            lines.append(DrawnLine(plain_text(piece), row))
        elif piece:
            last = ""
            if piece.endswith("\n"):
                row += 1
            elif piece.endswith("A"):
                drawn = lines.pop() if lines else DrawnLine("", row)
                row -= int(piece[2:-1][:4] or 1)
                lines.append(DrawnLine(drawn.text, drawn.row, row))
    lines = [line for line in lines if line.moves_up_to is not None or line.text.strip()]
    # The last line may not be whole yet: what it overwrites stays.
    kept = [
        line for line, after in itertools.pairwise(lines[:-1]) if line.moves_up_to is not None or after.row != line.row
    ]
    return [*kept, *lines[-2:]][-MOST_LINES:], row, last[-LONGEST_LINE:]


def plain_text(text: str) -> str:
    """Return a line without escape sequences and control characters, at most 1000 characters of it."""
    return _CONTROL.sub("", _ESCAPE.sub("", text[: 4 * LONGEST_LINE]))[:LONGEST_LINE]


class Level(Struct, frozen=True, kw_only=True):
    """The last drawing of something that counts. `depth` is the number of rows from which the cursor went back up."""

    count: Count
    row: int
    drawn: int
    changed: int
    depth: int = 0
    left_s: float | None = None
    is_header: bool = False  # nothing else is on its line
    fits_epochs: bool = False  # so much is done of it as of all epochs
    is_whole: bool = False  # it counts the whole work, not the part inside the level above


LevelKey = tuple[int, str, str]  # rank, unit, and of a bar its label and total
Levels = Mapping[LevelKey, Level]


class LogReader(Struct, frozen=True, kw_only=True):
    """What was read so far. The last line may go on: `shown` has its counts, and `levels` not yet."""

    levels: Levels = {}
    shown: Levels = {}
    drawings: int = 0
    row: int = 0
    last_line: str = ""
    has_inner: bool = False  # counts inside an epoch were seen

    def amount(self) -> WorkDone | None:
        """Return the progress of the whole work, or None if nothing was said about it."""
        chain = _chain(self.shown)
        if not chain:
            return None
        top, total = chain[0], chain[0].count.total
        done = _done(chain, has_inner=self.has_inner)
        is_latest = top.drawn == max(level.drawn for level in chain)
        left_s = top.left_s if top.count.is_bar and is_latest else None
        done = done if total is None else min(done, total)
        return WorkDone(done=done, total=total, unit=top.count.unit, left_s=left_s)


def advance(reader: LogReader, text: str) -> tuple[LogReader, list[tuple[tuple[str, float | None], ...]]]:
    """Return the reader after a piece of output, and the figures of each whole line that has some."""
    lines, row, last = drawn_lines(reader.last_line + text, reader.row)
    levels, number, figures, has_inner = dict(reader.levels), reader.drawings, [], reader.has_inner
    for line in lines[:-1] if last else lines:
        reading = read_line(line.text)
        if reading.counts:
            number += 1
            _add(levels, reading, line.row, number)
            is_inside = reading.counts[-1].rank == 2 and any(level.count.rank < 2 for level in levels.values())
            has_inner = has_inner or is_inside
        if reading.figures:
            figures.append(reading.figures)
        if not line.text.strip():  # a bar inside another one that was drawn over with blanks is over
            levels = {key: level for key, level in levels.items() if level.row != line.row or not level.depth}
        if (top := line.moves_up_to) is not None:  # what is below it is inside what is there
            sunk = {key: replace(level, depth=level.row - top) for key, level in levels.items() if level.row > top}
            levels.update(sunk)
    for key in sorted(levels, key=lambda key: levels[key].drawn)[:-16]:
        del levels[key]
    shown = dict(levels)
    if last and lines and (reading := read_line(lines[-1].text)).counts:
        _add(shown, reading, lines[-1].row, number + 1)
    after = LogReader(levels=levels, shown=shown, drawings=number, row=row, last_line=last, has_inner=has_inner)
    return after, figures


def _add(levels: dict[LevelKey, Level], reading: LineReading, row: int, number: int) -> None:
    for given in reading.counts:
        # Bars without a label differ in their totals.
        key = (given.rank, given.unit, f"{given.label}/{given.total}" if given.is_bar else "")
        before, count = levels.get(key), given
        if count.is_ordinal and (count.done == 0 or (before is not None and before.count.is_from_zero)):
            count = replace(count, is_ordinal=False, is_from_zero=True)
        levels[key] = Level(
            count=count, row=row, drawn=number,
            changed=number if before is None or before.count != count else before.changed,
            depth=before.depth if before is not None else 0, left_s=reading.left_s,
            is_header=len(reading.counts) == 1 and not reading.figures and not count.is_bar,
            fits_epochs=count.rank == 2 and _fits_epochs(count, levels),
            is_whole=before is not None and count.rank == 2 and _goes_on(before, count, levels),
        )  # fmt: skip


def _fits_epochs(count: Count, levels: Levels) -> bool:
    """Return whether as much of it is done as of all epochs, so that it may count the whole work."""
    epochs = max((each for each in levels.values() if each.count.rank == 1), key=lambda each: each.drawn, default=None)
    if epochs is None or not epochs.count.total or not count.total:
        return False
    first, total = epochs.count.done - epochs.count.is_ordinal, epochs.count.total
    return first / total - 0.01 <= count.done / count.total <= (first + 1) / total + 0.01


def _goes_on(before: Level, count: Count, levels: Levels) -> bool:
    """Return whether the count goes on from one epoch to the next, and fits the number of epochs."""
    if before.count.total != count.total or count.done < before.count.done:
        return False
    if before.is_whole:
        return True
    epochs = [level for level in levels.values() if level.count.rank == 1]
    has_begun = any(level.changed >= before.drawn and level.count.done > 1 for level in epochs)
    return has_begun and before.fits_epochs and before.count.done > 0 and _fits_epochs(count, levels)


def _chain(levels: Levels) -> list[Level]:
    """Return the levels that count now, from the outermost to the innermost."""
    by_rank: dict[int, list[Level]] = {0: [], 1: [], 2: []}
    for level in sorted(levels.values(), key=lambda level: level.drawn):
        by_rank[level.count.rank].append(level)
    whole = [level for level in by_rank[2] if level.is_whole]
    bars = whole[-1:] or by_rank[2]
    found = [] if whole else [*by_rank[0][-1:], *by_rank[1][-1:]]
    if roots := [bar for bar in bars if not bar.depth]:  # the last bar at the left, and those inside it
        inside = {bar.depth: bar for bar in bars if bar.depth and bar.drawn >= roots[-1].changed}
        bars = [roots[-1], *(inside[depth] for depth in sorted(inside))]
    else:
        bars = bars[-1:]
    chain: list[Level] = []
    for level in (*found, *bars):
        # What was drawn before the level above it last changed belongs to an earlier part of the work.
        if not chain or level.drawn >= chain[-1].changed:
            chain.append(level)
    return chain


def _done(chain: Sequence[Level], *, has_inner: bool) -> float:
    """Return how many units of the first level are done, with the part that the levels inside it say."""
    level, inside = chain[0], chain[1:]
    count = level.count
    if not inside:
        begins = level.is_header and (count.done <= 1 or has_inner)
        return count.done - 1 if count.is_ordinal and begins and count.done >= 1 else count.done
    total = inside[0].count.total
    part = 0.0 if not total else min(1.0, _done(inside, has_inner=has_inner) / total)
    return max(0.0, count.done - 1 if count.is_ordinal else count.done) + part
