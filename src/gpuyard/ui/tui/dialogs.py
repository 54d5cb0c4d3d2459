"""Screens on top of the main one: a page of text, a question."""

from collections.abc import Callable
from typing import ClassVar, Protocol

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import Static

from gpuyard.ui.tui.glyphs import Glyphs
from gpuyard.ui.tui.header_view import rule
from gpuyard.ui.tui.line_panel import LinePanel


class Scroll(Protocol):
    """Text that can be read from any line on."""

    def __len__(self) -> int: ...

    def lines(self, start: int, count: int) -> list[Text]: ...


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

    def __init__(self, title: Callable[[], Text], glyphs: Glyphs, *, is_followed: bool = False) -> None:
        super().__init__()
        self._title, self._glyphs = title, glyphs
        self._can_follow = self._is_followed = is_followed
        self._page = LinePanel(glyphs, "page")
        self._text: Scroll | None = None
        self._top = self._left = 0

    def compose(self) -> ComposeResult:
        yield self._page

    def on_mount(self) -> None:
        self.draw()

    def on_resize(self) -> None:
        self.draw()

    def put(self, text: Scroll) -> None:
        self._text = text
        self.draw()

    def draw(self) -> None:
        height, length = self._text_height, 0 if self._text is None else len(self._text)
        most = max(0, length - height)
        self._top = most if self._is_followed else max(0, min(self._top, most))
        shown = [] if self._text is None else self._text.lines(self._top, height)
        seen = f"{self._top + 1}-{self._top + len(shown)} of {length}  " if most else ""
        heading = rule(self._title(), Text(f"{seen}Esc: back"), self.size.width, self._glyphs)
        self._page.show([heading, *(line[self._left :] if self._left else line for line in shown)])

    def action_scroll(self, by: int) -> None:
        length = 0 if self._text is None else len(self._text)
        self._top = max(0, min(self._top + by, max(0, length - self._text_height)))
        self._is_followed = self._can_follow and by > 0 and self._top >= length - self._text_height
        self.draw()

    def action_page(self, pages: int) -> None:
        self.action_scroll(pages * max(1, self._text_height - 1))

    def action_shift(self, by: int) -> None:
        self._left = max(0, self._left + by)
        self.draw()

    def on_line_panel_wheeled(self, event: LinePanel.Wheeled) -> None:
        self.action_scroll(3 * event.by)

    @property
    def _text_height(self) -> int:
        return max(1, self.size.height - 1)


class Question(ModalScreen[bool]):
    """A yes-or-no question; other keys are ignored."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)"),
        Binding("n,q,escape", "answer(False)"),
    ]
    DEFAULT_CSS = """
    Question { align: center middle; }
    Question Static { width: auto; max-width: 90%; height: auto; padding: 0 2; }
    """

    def __init__(self, text: str, glyphs: Glyphs) -> None:
        super().__init__()
        self._text, self._glyphs = text, glyphs

    def compose(self) -> ComposeResult:
        box = Static(Text.assemble((self._glyphs.spell(self._text), "bold"), "\n\n", "y: yes   n: no"))
        box.styles.border = ("round" if self._glyphs.is_unicode else "ascii", "ansi_yellow")
        yield box

    def action_answer(self, is_yes: bool) -> None:  # noqa: FBT001 - it comes from a binding
        self.dismiss(is_yes)
