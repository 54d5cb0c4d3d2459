"""Tables as plain text, without a library: commands that scripts call in loops cannot afford to import one.

All pure. A table fits the width it is given: `is_spare` columns are dropped first, then `is_long` ones are cut.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# A text and its style (a key of `terminal.STYLES`), and a line of them.
Span = tuple[str, str | None]
Line = tuple[Span, ...]

GAP = "  "


class Column:
    """`is_long` cells are cut when the table is too wide; `is_spare` columns are dropped before that."""

    def __init__(self, heading: str, *, is_right: bool = False, is_long: bool = False, is_spare: bool = False) -> None:
        self.heading, self.is_right, self.is_long, self.is_spare = heading, is_right, is_long, is_spare


def make_columns(
    *headings: str, right: "Sequence[str]" = (), long: "Sequence[str]" = (), spare: "Sequence[str]" = ()
) -> list[Column]:
    """Return the columns; the other arguments are the headings of those that are right-aligned, long or spare."""
    return [Column(name, is_right=name in right, is_long=name in long, is_spare=name in spare) for name in headings]


def lay_out(columns: "Sequence[Column]", rows: "Sequence[Sequence[str]]", width: int | None) -> list[list[str]]:
    """Return the headings and the rows as padded cells. A line is at most `width` columns wide; None: no limit."""
    table = [[column.heading for column in columns], *([clean(cell) for cell in row] for row in rows)]
    widths = [max(cell_width(row[at]) for row in table) for at in range(len(columns))]
    kept = list(range(len(columns)))
    least = [min(widths[at], 14) if columns[at].is_long else widths[at] for at in kept]
    for at in reversed(range(len(columns))):
        least_width = sum(least[each] for each in kept) + len(GAP) * (len(kept) - 1)
        if width is not None and columns[at].is_spare and least_width > width:
            kept.remove(at)
    long = sorted((at for at in kept if columns[at].is_long), key=lambda at: widths[at])
    if width is None:  # as in a pipe: a column, and the last one
        for at in long:
            widths[at] = min(widths[at], 1000 if at == kept[-1] else 60)
    else:  # share what the others leave among the long ones; the shortest of them is cut last
        left = width - sum(widths[at] for at in kept if not columns[at].is_long) - len(GAP) * (len(kept) - 1)
        for number, at in enumerate(long):
            widths[at] = max(1, min(widths[at], left // (len(long) - number)))
            left -= widths[at]
    return [[pad(cut(row[at], widths[at]), widths[at], is_right=columns[at].is_right) for at in kept] for row in table]


def lay_out_lines(
    columns: "Sequence[Column]",
    rows: "Sequence[Sequence[str]]",
    width: int | None,
    *,
    styles: "Sequence[dict[str, str | None]]" = (),
) -> list[Line]:
    """Return the headings, which are dim, and the rows. `styles`: for each row, the styles of cells by heading."""
    heading, *lines = lay_out(columns, rows, width)
    names = [cell.strip() for cell in heading]
    table: list[Line] = [((join_cells(heading), "dim"),)]
    for place, cells in enumerate(lines):
        style = styles[place] if styles else {}
        table.append(join_spans((cell, style.get(name)) for name, cell in zip(names, cells, strict=True)))
    return table


def lay_out_facts(facts: "Iterable[tuple[str, Sequence[str]]]") -> list[str]:
    """Return `title  text` lines, indented. A fact with several texts has its title on the first line only."""
    rows = [("" if number else title, text) for title, texts in facts for number, text in enumerate(texts)]
    _, *lines = lay_out((Column(""), Column("")), rows, None)
    return [f"{GAP}{join_cells(line)}" for line in lines]


def join_cells(cells: "Iterable[str]") -> str:
    return GAP.join(cells).rstrip()


def join_spans(spans: "Iterable[Span]") -> Line:
    """Return the cells as a line with gaps between them, without trailing spaces."""
    line = [part for span in spans for part in ((GAP, None), span)][1:]
    while line and not line[-1][0].strip():
        line.pop()
    return (*line[:-1], (line[-1][0].rstrip(), line[-1][1])) if line else ()


def clean(text: str) -> str:
    """Return the text on one line, without control characters, which a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in text)


# What stands for the signs that are drawn here where the encoding or the terminal lacks them; each as wide as its sign.
_ASCII = str.maketrans("█▉▊▋▌▍▎▏░▒▁▂▃▄▅▆▇·×…─│└▶°●◍◔◐○◌‖✗✓", "#-------.+_:-=+*%.x~-|+> *@ooo.|x+")  # noqa: RUF001


def spell(text: str, encoding: str) -> str:
    """Return the text without characters that the encoding lacks: signs as ASCII, others as question marks."""
    if not encoding.lower().startswith("utf"):
        text = text.translate(_ASCII)
    return text.encode(encoding, "replace").decode(encoding)


def cell_width(text: str) -> int:
    """Return the number of terminal columns that the text takes."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(2 if east_asian_width(char) in "WF" else 1 for char in text if not combining(char))


def cut(text: str, width: int, ellipsis: str = "…") -> str:
    if cell_width(text) <= width:
        return text
    left = width - len(ellipsis)
    kept = []
    for char in text:
        left -= cell_width(char)
        if left < 0:
            break
        kept.append(char)
    return "".join(kept) + ellipsis[:width]


def cut_line(line: Line, width: int) -> Line:
    shown: list[Span] = []
    for text, style in line:
        left = width - sum(cell_width(part) for part, _ in shown)
        if cell_width(text) > left:
            return (*shown, (cut(text, left), style))
        shown.append((text, style))
    return tuple(shown)


def cut_middle(text: str, width: int) -> str:
    """Cut before the last two fifths: names of runs and paths differ there. Narrower texts lose their end."""
    if cell_width(text) <= width or width < 12:
        return cut(text, width)
    end = text[-(width * 2 // 5) :]
    while cell_width(end) > width * 2 // 5:
        end = end[1:]
    return cut(text, width - cell_width(end)) + end


def pad(text: str, width: int, *, is_right: bool = False) -> str:
    padding = " " * (width - cell_width(text))
    return padding + text if is_right else text + padding
