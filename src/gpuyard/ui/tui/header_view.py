"""The lines around the panels: host and queue status, headings, notices, keys. All pure."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec import convert
from rich.text import Text

from gpuyard.core.snapshot import Host
from gpuyard.core.units import UNKNOWN
from gpuyard.ui.cli.text_table import clean, cut
from gpuyard.ui.tui.glyphs import Glyphs
from gpuyard.ui.tui.job_actions import ACTS, ActionNotice
from gpuyard.ui.views.device_tables import host_line

KEYS = (
    ("Enter", "show"), ("w", "why"), ("l", "log"), ("Space", "mark"), ("c", "cancel"), ("t", "retry"), ("h", "hold"),
    ("r", "release"), ("F", "failed"), ("/", "filter"), ("+-", "priority"), ("s", "suspend"), ("u", "resume"),
    ("f", "finished"), ("a", "mark all"), ("p", "pause"),
)  # fmt: skip
_LAST_KEYS = (("?", "help"), ("q", "quit"))
_GAP = 2
_RULES = 5


def head_line(host: Mapping[str, Any], status: Mapping[str, Any], trouble: str | None, width: int) -> Text:
    right = Text(f" {clean(trouble)} ", "bold reverse") if trouble else _queue_status(status)
    known = convert({**host, "limited_by": None}, Host)
    left = Text.assemble(("gpuyard", "bold"), "  ", clean(host_line(known)) if host else UNKNOWN)
    left.truncate(max(0, width - right.cell_len - 1))
    left.pad_right(max(0, width - left.cell_len - right.cell_len))
    return left.append_text(right)


def _queue_status(status: Mapping[str, Any]) -> Text:
    if status.get("draining"):
        return Text(" draining: running jobs finish ", "bold reverse")
    if status.get("paused"):
        return Text(" paused: no new jobs start ", "bold reverse")
    return Text()


def rule(title: Text, right: Text, width: int, glyphs: Glyphs) -> Text:
    """Return a heading such as `── title ───── right ──`; the title is cut if both do not fit."""
    dash = glyphs.rule
    end = Text.assemble(" ", right, (f" {dash * 2}", "dim")) if right.plain else Text()
    title = title.copy()
    title.truncate(max(0, width - end.cell_len - _RULES))
    line = Text.assemble((dash * 2 + " ", "dim"), title, " ")
    line.append(dash * max(0, width - line.cell_len - end.cell_len), "dim").append_text(end)
    line.truncate(width)
    return line


def notice_line(notice: ActionNotice, notices: Sequence[str], width: int, glyphs: Glyphs) -> Text:
    if notice.text:
        return Text(cut(notice.text, width, glyphs.ellipsis), "bold red" if notice.is_bad else "bold")
    return Text(cut(clean(f"! {notices[0]}"), width, glyphs.ellipsis), "yellow") if notices else Text()


def keys_line(width: int, verbs: Collection[str] = ACTS) -> Text:
    """Return as many keys as fit, without actions that are not among `verbs`; help and quit are always shown."""
    last = _keys_text(_LAST_KEYS)
    shown = [(key, what) for key, what in KEYS if what not in ACTS or what in verbs]
    while shown and _keys_text(shown).cell_len + _GAP + last.cell_len > width:
        shown.pop()
    return Text("  ").join([_keys_text(shown), last]) if shown else last


def _keys_text(keys: Sequence[tuple[str, str]]) -> Text:
    return Text("  ").join(Text.assemble((key, "bold reverse"), f" {what}") for key, what in keys)
