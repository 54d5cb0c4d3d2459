"""A panel of text lines that redraws only lines that changed."""

from collections.abc import Sequence

from rich.segment import Segment
from rich.text import Text
from textual import events
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from gpuyard.ui.tui.glyphs import Glyphs


class LinePanel(Widget):
    ALLOW_SELECT = False

    class Pointed(Message):
        """The user clicked on a line."""

        def __init__(self, panel: str | None, line: int) -> None:
            super().__init__()
            self.panel, self.line = panel, line

    class Wheeled(Message):
        def __init__(self, panel: str | None, by: int) -> None:
            super().__init__()
            self.panel, self.by = panel, by

    def __init__(self, glyphs: Glyphs, panel: str | None = None) -> None:
        super().__init__(id=panel)
        self._glyphs = glyphs
        self._lines: list[Text] = []

    def show(self, lines: Sequence[Text]) -> None:
        before, self._lines = self._lines, list(lines)
        for y in range(max(len(before), len(lines))):
            if y >= len(before) or y >= len(lines) or not _same(before[y], lines[y]):
                self.refresh(Region(0, y, self.size.width, 1))

    def render_line(self, y: int) -> Strip:
        width, style, console = self.size.width, self.rich_style, self.app.console
        if y >= len(self._lines):
            return Strip.blank(width, style)
        line = self._lines[y]
        drawn = Segment.apply_style(line.render(console), style + console.get_style(line.style))
        spelled = [Segment(self._glyphs.spell(segment.text), segment.style) for segment in drawn]
        return Strip(spelled).adjust_cell_length(width, style)

    def on_click(self, event: events.Click) -> None:
        self.post_message(self.Pointed(self.id, event.y))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.post_message(self.Wheeled(self.id, 1))

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.post_message(self.Wheeled(self.id, -1))


def _same(one: Text, other: Text) -> bool:
    return one == other and one.style == other.style
