"""A report as one self-contained HTML file: style and SVG charts inline, no scripts, nothing fetched.

Light or dark as the system of the reader. Every text is escaped: names of jobs are data."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from gpuyard.ui.views import report_text as texts
from gpuyard.ui.views.report_text import Answer

# The picture: width and height of an hour, and what is left, above and right of the hours.
_CELL, _ROW, _LEFT, _TOP, _RIGHT = 28, 24, 96, 22, 84
_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --panel: #f4f6f8; --line: #d5dbe1; --ink: #1c2329;
  --faint: #59636e; --accent: #1a7f4b; --bad: #b42318 }
@media (prefers-color-scheme: dark) { :root { --ground: #12161b; --panel: #1c222a; --line: #333c47; --ink: #e6eaee;
  --faint: #9aa5b1; --accent: #3fc380; --bad: #ff8a7a } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 960px; padding: 2rem 1.25rem 3rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif }
h1 { font-size: 1.6rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem }
p { margin: .2rem 0 0; color: var(--faint) }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .75rem; margin: 1.5rem 0 0 }
.facts div { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: .7rem .9rem }
dt { color: var(--faint); font-size: .85rem } dd { margin: 0 }
dd.figure { font-size: 1.7rem; font-weight: 650; line-height: 1.25 } dd.note { font-size: .85rem; color: var(--faint) }
.wide { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th { text-align: left; font-weight: 600; font-size: .85rem; color: var(--faint) }
th, td { padding: .35rem .75rem .35rem 0; border-bottom: 1px solid var(--line); white-space: nowrap }
td:first-child { max-width: 22rem; overflow: hidden; text-overflow: ellipsis }
.number { text-align: right } .bad { color: var(--bad) }
svg { display: block } svg text { fill: var(--faint); font-size: 12px }
.picture { max-width: 100%; min-width: 600px; height: auto }
@media (max-width: 600px) { td svg { width: 72px } }
.bar { fill: var(--accent) } .bad .bar { fill: var(--bad) }
.track { fill: var(--panel) } .cell { fill: var(--accent) } .empty { fill: var(--panel) }
"""


def report_page(report: Answer) -> str:
    parts = [f"<h1>GPU report</h1><p>{escape(texts.title(report))}</p>"]
    if not report["total"]["attempts"]:
        parts.append(f"<p>{escape(texts.NOTHING_RAN)}</p>")
    else:
        cards = (
            f'<div><dt>{escape(heading)}</dt><dd class="figure">{escape(figure)}</dd>'
            f'<dd class="note">{escape(note)}</dd></div>'
            for heading, figure, note in texts.facts(report)
        )
        parts += [f'<dl class="facts">{"".join(cards)}</dl>', *_picture(report), *_tables(report)]
    return "\n".join([
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">""",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>GPU report: {escape(texts.title(report))}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
        *parts,
        "</body>\n</html>\n",
    ])  # fmt: skip


def _tables(report: Answer) -> Iterator[str]:
    groups, causes, devices = report["groups"], report["total"]["causes"], report["devices"]
    most = max(group["gpu_hours"] for group in groups)
    figures = ("GPU-hours", "", "Energy", "Idle", "Jobs", "Attempts", "Median wait", "Waste", "Failed")
    headings = (report["by"].capitalize(), *figures)
    rows = [_cells(texts.group_cells(group), _bar(group["gpu_hours"], most)) for group in groups]
    for cells, group in zip(rows, groups, strict=True):
        if texts.failed_count(group):
            cells[-1] = f'<span class="bad">{cells[-1]}</span>'
    yield _table(f"By {report['by']}", headings, rows)
    if causes:
        most = causes[0]["attempts"]
        bars = [f'<span class="bad">{_bar(cause["attempts"], most)}</span>' for cause in causes]
        rows = [_cells(texts.cause_cells(cause), bar) for cause, bar in zip(causes, bars, strict=True)]
        yield _table("Attempts that did not succeed", ("Cause", "Attempts", "", "Recovered"), rows)
    if devices:
        rows = [_cells(texts.device_cells(device), _bar(device["busy_percent"] or 0.0, 100.0)) for device in devices]
        yield _table("Busiest GPUs", ("GPU", "In use", "", "Hours", "Attempts"), rows)


def _cells(cells: Sequence[str], bar: str) -> list[str]:
    name, *figures = map(escape, cells)
    return [name, bar, *figures]


def _table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are HTML already; cells after the bar are right-aligned figures."""
    sides = ["", "", *[' class="number"'] * (len(headings) - 2)]
    head = "".join(f"<th{side}>{escape(heading)}</th>" for side, heading in zip(sides, headings, strict=True))
    body = "\n".join(
        f"<tr>{''.join(f'<td{side}>{cell}</td>' for side, cell in zip(sides, cells, strict=True))}</tr>"
        for cells in rows
    )
    return (
        f'<h2>{escape(title)}</h2>\n<div class="wide"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def _bar(value: float, most: float) -> str:
    width = 160 * value / most if most else 0.0
    return (
        '<svg width="160" height="12" viewBox="0 0 160 12" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="track" width="160" height="12" rx="3"/>'
        f'<rect class="bar" width="{max(width, 2.0 if value else 0.0):.1f}" height="12" rx="3"/></svg>'
    )


def _picture(report: Answer) -> Iterator[str]:
    if not report["box"]["devices"]:
        return
    rows, days = report["picture"]["rows"], report["picture"]["days_per_row"]
    width, height = _LEFT + 24 * _CELL + _RIGHT, _TOP + len(rows) * _ROW + 4
    title = texts.picture_text(report)
    hours = "".join(_text(_LEFT + hour * _CELL + 2, _TOP - 8, f"{hour:02}") for hour in range(0, 24, 3))
    drawn = []
    for number, row in enumerate(rows):
        day, top = texts.day_text(row, days), _TOP + number * _ROW
        cells = "".join(
            _cell(percent, _LEFT + hour * _CELL, top, f"{day}, {hour:02}:00")
            for hour, percent in enumerate(row["used_percent"])
            if percent is not None
        )
        total = _text(width, top + _ROW - 8, texts.hours_text(sum(row["gpu_hours"])), is_right=True)
        drawn.append(f"{_text(0, top + _ROW - 8, day)}{cells}{total}")
    yield (
        f'<h2>{escape(title)}</h2>\n<div class="wide"><svg class="picture" role="img" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}"><title>{escape(title)}</title>\n{hours}'
        f"{_text(width, _TOP - 8, 'GPU-hours', is_right=True)}\n{chr(10).join(drawn)}</svg></div>"
        "<p>Each square is an hour: the stronger the colour, the more GPUs were in use.</p>"
    )


def _cell(percent: float, left: int, top: int, when: str) -> str:
    # An hour with any use is not so faint that it looks unused.
    kind, opacity = ("cell", 0.16 + 0.84 * percent / 100) if percent else ("empty", 1.0)
    note = escape(f"{when}: {texts.percent_text(percent)} of the GPUs in use")
    return (
        f'<rect class="{kind}" x="{left}" y="{top}" width="{_CELL - 2}" height="{_ROW - 2}" rx="3" '
        f'fill-opacity="{opacity:.2f}"><title>{note}</title></rect>'
    )


def _text(x: int, y: int, text: str, *, is_right: bool = False) -> str:
    anchor = ' text-anchor="end"' if is_right else ""
    return f'<text x="{x}" y="{y}"{anchor}>{escape(text)}</text>'
