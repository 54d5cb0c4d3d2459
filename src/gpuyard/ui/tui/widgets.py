"""Widgets: a panel of lines, and the screens on top of the main one, a page of text and a question."""

from collections.abc import Callable
from typing import ClassVar

from rich.segment import Segment
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.screen import ModalScreen
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Static

from gpuyard.ui.tui.job_actions import rule
from gpuyard.ui.tui.terminal_text import LogText

Heard = Callable[[int], None]
# Makes a text of what the terminal can show.
Spell = Callable[[str], str]


class LinePanel(Widget):
    """Lines of text; redraws only those that changed. `wheeled` is called with 1 or -1, `clicked` with the line."""

    ALLOW_SELECT = False

    def __init__(self, spell: Spell, name: str, wheeled: Heard | None, clicked: Heard | None = None) -> None:
        super().__init__(id=name)
        self._spell, self._wheeled, self._clicked = spell, wheeled, clicked
        self._lines: list[Text] = []

    def show(self, lines: list[Text]) -> None:
        before, self._lines = self._lines, lines
        for y in range(max(len(before), len(lines))):
            was, is_now = before[y : y + 1], lines[y : y + 1]
            if was != is_now or was[0].style != is_now[0].style:
                self.refresh(Region(0, y, self.size.width, 1))

    def render_line(self, y: int) -> Strip:
        width, style, console = self.size.width, self.rich_style, self.app.console
        if y >= len(self._lines):
            return Strip.blank(width, style)
        line = self._lines[y]
        drawn = Segment.apply_style(line.render(console), style + console.get_style(line.style))
        spelled = [Segment(self._spell(segment.text), segment.style) for segment in drawn]
        return Strip(spelled).adjust_cell_length(width, style)

    def on_click(self, event: events.Click) -> None:
        if self._clicked is not None:
            self._clicked(event.y)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._turn_wheel(event, 1)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._turn_wheel(event, -1)

    def _turn_wheel(self, event: events.Event, by: int) -> None:
        event.stop()
        if self._wheeled is not None:
            self._wheeled(by)


class TextDialog(ModalScreen[None]):
    """A page that fills the window. A followed one shows its end until the user scrolls up."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "scroll(-1)"),
        Binding("down,j", "scroll(1)"),
        Binding("pageup,b", "page(-1)"),
        Binding("pagedown,space", "page(1)"),
        Binding("home,g", "scroll(-1000000)"),
        Binding("end,G", "scroll(1000000)"),
        Binding("left", "shift(-16)"),
        Binding("right", "shift(16)"),
        Binding("escape,q,enter,l,w,question_mark", "dismiss"),
    ]

    def __init__(self, title: Callable[[], Text], spell: Spell, *, is_followed: bool = False) -> None:
        super().__init__()
        self._title, self._spell = title, spell
        self._can_follow = self._is_followed = is_followed
        self._page = LinePanel(spell, "page", lambda by: self.action_scroll(3 * by))
        self._text: list[Text] | LogText = []
        self._top = self._left = 0

    def compose(self) -> ComposeResult:
        yield self._page

    def on_mount(self) -> None:
        self.draw()

    def on_resize(self) -> None:
        self.draw()

    def put(self, text: list[Text] | LogText) -> None:
        self._text = text
        self.draw()

    def draw(self) -> None:
        most = max(0, len(self._text) - self._text_height)
        self._top = most if self._is_followed else max(0, min(self._top, most))
        shown = self._text[self._top : self._top + self._text_height]
        seen = f"{self._top + 1}-{self._top + len(shown)} of {len(self._text)}  " if most else ""
        heading = rule(self._title(), Text(f"{seen}Esc: back"), self.size.width)
        self._page.show([heading, *(line[self._left :] if self._left else line for line in shown)])

    def action_scroll(self, by: int) -> None:
        most = max(0, len(self._text) - self._text_height)
        self._top = max(0, min(self._top + by, most))
        self._is_followed = self._can_follow and by > 0 and self._top >= most
        self.draw()

    def action_page(self, pages: int) -> None:
        self.action_scroll(pages * max(1, self._text_height - 1))

    def action_shift(self, by: int) -> None:
        self._left = max(0, self._left + by)
        self.draw()

    @property
    def _text_height(self) -> int:
        return max(1, self.size.height - 1)


class Question(ModalScreen[bool]):
    """A yes-or-no question; other keys are ignored."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("y", "answer(True)"), Binding("n,q,escape", "answer(False)")]
    DEFAULT_CSS = """
    Question { align: center middle; }
    Question Static { width: auto; max-width: 90%; height: auto; padding: 0 2; }
    """

    def __init__(self, text: str, spell: Spell) -> None:
        super().__init__()
        self._text, self._spell = text, spell

    def compose(self) -> ComposeResult:
        box = Static(Text.assemble((self._spell(self._text), "bold"), "\n\n", "y: yes   n: no"))
        box.styles.border = ("round" if self._spell("─") == "─" else "ascii", "ansi_yellow")
        yield box

    def action_answer(self, is_yes: bool) -> None:  # noqa: FBT001 - it comes from a binding
        self.dismiss(is_yes)
