"""The application of `gpuyard top`: handles keys, and draws the panels from the screen state."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import ClassVar

from msgspec.structs import replace
from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widgets import Input, Static
from textual.worker import Worker

from gpuyard.client.supply_secrets import merge, second_request
from gpuyard.errors import GpuyardError
from gpuyard.ui.cli.jobs.job_text import row_ids
from gpuyard.ui.cli.text_table import clean, spell
from gpuyard.ui.tui import job_actions as pages
from gpuyard.ui.tui.job_actions import ActionNotice, describe_refusal, describe_result, failed, name_rows, rows_for
from gpuyard.ui.tui.queue_view import Row, RowKey, choose, ids_text, job_title, move
from gpuyard.ui.tui.screen_state import FINISHED_SHOWN, ScreenState
from gpuyard.ui.tui.streams import MOST_MARKED, Answer, Subscriptions, Work
from gpuyard.ui.tui.widgets import LinePanel, Question, TextDialog

_TO_AN_END = 10**9
_ACT_KEYS = {"c": "cancel", "h": "hold", "r": "release", "s": "suspend", "u": "resume", "t": "retry"}


class Top(App[None]):
    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = None
    CSS = """
    Screen { overflow: hidden; }
    LinePanel { width: 100%; height: 1; }
    #page { height: 100%; }
    #filter { display: none; height: 1; }
    #filter Static { width: auto; }
    Input { width: 1fr; background: ansi_default; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)"),
        Binding("down,j", "move(1)"),
        Binding("pageup", "page(-1)"),
        Binding("pagedown", "page(1)"),
        Binding("home,g", f"move({-_TO_AN_END})"),
        Binding("end,G", f"move({_TO_AN_END})"),
        Binding("enter", "read('about')"),
        Binding("w", "read('why')"),
        Binding("l", "log"),
        *(Binding(key, f"act('{verb}')") for key, verb in _ACT_KEYS.items()),
        Binding("plus,equals_sign", "prioritise(1)"),
        Binding("minus", "prioritise(-1)"),
        Binding("slash", "show_filter(True)"),
        Binding("escape", "unfilter"),
        Binding("space", "mark"),
        Binding("a", "mark_all"),
        Binding("F", "only_failed"),
        Binding("f", "finished"),
        Binding("p", "pause"),
        Binding("left_square_bracket", "devices(-1)"),
        Binding("right_square_bracket", "devices(1)"),
        Binding("question_mark", "help"),
        Binding("q", "quit"),
        Binding("ctrl+c", "quit", priority=True),
        Binding("ctrl+z", "suspend_process", priority=True),
    ]

    def __init__(self, *, is_unicode: bool) -> None:
        super().__init__(ansi_color=True)
        self._spell = partial(spell, encoding="utf-8" if is_unicode else "ascii")
        self.screen_state = ScreenState()
        self._subscriptions = Subscriptions(
            self.screen_state, self._draw, self._show_notice, partial(self._run, in_place=True)
        )
        self._made = {
            "head": self.screen_state.head, "devices": self.screen_state.devices, "queue": self.screen_state.queue,
            "log": self.screen_state.log_lines, "notice": self.screen_state.notices, "keys": self.screen_state.keys,
        }  # fmt: skip
        wheels = {"devices": self.action_devices, "queue": self.action_move}
        clicks = {"queue": self._select_line}
        self._panels = {name: LinePanel(self._spell, name, wheels.get(name), clicks.get(name)) for name in self._made}
        self._acting = asyncio.Lock()
        self._log_reader: TextDialog | None = None
        self._stop_forgetting: Callable[[], None] = lambda: None

    def compose(self) -> ComposeResult:
        *panels, keys = self._panels.values()
        yield from panels
        with Horizontal(id="filter"):
            yield Static("only jobs with ")
            # A paste by mistake may be longer than a request can be.
            yield Input(placeholder="part of a name, a tag or a command, or an id", max_length=1000, compact=True)
        yield keys

    def on_mount(self) -> None:
        self._subscriptions.start()

    def on_resize(self, event: events.Resize) -> None:
        self.screen_state.resize(event.size.width, event.size.height)
        self._draw()
        self._subscriptions.follow_visible()

    def _run(self, work: Work, group: str, *, in_place: bool = False) -> Worker[object]:
        """Start a worker from a function, not a coroutine: a worker that is cancelled at once then never starts."""
        return self.run_worker(work, group=group, exclusive=in_place)

    def _draw(self, *names: str) -> None:
        heights = self.screen_state.heights()
        high = {"devices": heights.devices, "queue": heights.queue, "log": heights.log}
        if "queue" in names:
            names = (*names, "keys")  # which keys apply depends on the selected job
        for name in names or self._panels:
            panel = self._panels[name]
            if not names and name in high:
                panel.styles.height, panel.display = high[name], high[name] > 0
            panel.show(self._made[name]())
        if self._log_reader is not None and "log" in (names or self._panels):
            self._log_reader.put(self.screen_state.log)

    def _show_notice(self, notice: ActionNotice) -> None:
        self.screen_state.notice = notice
        self._stop_forgetting()

        def forget() -> None:
            self.screen_state.notice = ActionNotice()
            self._draw("notice")

        self._stop_forgetting = self.set_timer(15.0, forget).stop
        self._draw("notice")

    def action_move(self, by: int) -> None:
        self.screen_state.window = move(self.screen_state.window, by, self.screen_state.page)
        self._draw("queue", "log")
        self._subscriptions.follow_visible()

    def action_page(self, pages: int) -> None:
        self.action_move(pages * max(1, self.screen_state.window.height - 1))

    def _select_line(self, line: int) -> None:
        """Select the job of the line; the first two lines of the queue are headings."""
        at = self.screen_state.window.top + line - 2
        if line >= 2 and at < self.screen_state.page.total:
            self.action_move(at - self.screen_state.window.at)

    def action_devices(self, by: int) -> None:
        self.screen_state.scroll_devices(by)
        self._draw("devices")

    def _show_from_top(self) -> None:
        """Show the list from its first row on, after its filter has changed."""
        self.screen_state.window = choose(replace(self.screen_state.window, top=0), 0, self.screen_state.page)
        self._draw("queue")
        self._subscriptions.follow_visible()

    def on_input_changed(self, event: Input.Changed) -> None:
        self.screen_state.search = event.value.strip()
        self._show_from_top()

    def on_input_submitted(self) -> None:
        self.action_show_filter(is_shown=False)

    def action_unfilter(self) -> None:
        if self.screen_state.is_filtered:
            self.screen_state.sweep, self.screen_state.only_failed = None, False
            self._show_from_top()
        else:
            self.screen_state.marked = {}
            self._draw("queue")
        self.query_one(Input).value = ""
        self.action_show_filter(is_shown=False)

    def action_only_failed(self) -> None:
        self.screen_state.only_failed = not self.screen_state.only_failed
        self._show_from_top()

    def action_mark(self) -> None:
        row = self._chosen()
        if row is not None:
            marked = self.screen_state.marked
            if marked.pop(row_ids(row), None) is None:
                marked[row_ids(row)] = row
            self.action_move(1)

    def action_mark_all(self) -> None:
        self._run(self._mark_all, "acts")

    async def _mark_all(self) -> None:
        asked = self.screen_state.filter_query()
        query = {"limit": str(MOST_MARKED), **asked}
        try:
            listed = (await self._subscriptions.stream.ask("GET", "/jobs", query))["jobs"]
        except GpuyardError as error:
            self._show_notice(failed(error))
            return
        if asked == self.screen_state.filter_query():
            self.screen_state.marked |= {row_ids(row): row for row in listed}
            self._draw("queue")

    def action_show_filter(self, is_shown: bool) -> None:  # noqa: FBT001 - it comes from a binding
        self.query_one("#filter").display = is_shown
        self.set_focus(self.query_one(Input) if is_shown else None)
        self._panels["notice"].display = not is_shown

    def action_finished(self) -> None:
        place = FINISHED_SHOWN.index(self.screen_state.finished) + 1
        self.screen_state.finished = FINISHED_SHOWN[place % len(FINISHED_SHOWN)]
        self._show_notice(ActionNotice(f"finished jobs: {self.screen_state.finished}"))
        self._subscriptions.follow_visible()

    def _chosen(self) -> Row | None:
        row = self.screen_state.chosen
        if row is None:
            self._show_notice(ActionNotice("no job is selected", is_bad=True))
        return row

    async def action_help(self) -> None:
        reader = TextDialog(lambda: Text("Keys", "bold"), self._spell)
        await self.push_screen(reader)
        reader.put(pages.wrap(pages.help_lines(), self.size.width))

    async def action_log(self) -> None:
        if self._chosen() is not None:
            self._log_reader = TextDialog(self.screen_state.log_title, self._spell, is_followed=True)
            await self.push_screen(self._log_reader, lambda _: setattr(self, "_log_reader", None))
            self._draw("log")

    def action_read(self, page: str) -> None:
        row = self._chosen()
        if row is not None and row.get("group") and page == "about":
            self.screen_state.sweep = row
            self._show_from_top()
        elif row is not None:
            self._run(partial(self._read, page, row["id"], job_title(row)), "page")

    async def _read(self, page: str, job_id: int, name: str) -> None:
        """Open a page about a job, and update it until it is closed."""
        title, target = f"job {name}", f"/jobs/{job_id}"
        if page == "why":
            title, target = f"why: {title}", f"{target}/why"
        reader = TextDialog(lambda: Text(clean(title), "bold"), self._spell)

        def close(_: object) -> None:
            self.workers.cancel_group(self, "page")

        await self.push_screen(reader, close)
        async with aclosing(self._subscriptions.stream.watch(target)) as answers:
            async for answer in answers:
                try:
                    if "error" in answer:
                        lines = [Text(clean(answer["error"]), "red")]
                    elif page == "why":
                        lines = pages.why(answer)
                    else:
                        history = await self._subscriptions.stream.ask("GET", f"/jobs/{job_id}/history")
                        lines = pages.about(answer, history, self.size.width)
                except GpuyardError as error:  # the daemon has stopped; the next one answers again
                    lines = [Text(clean(str(error)), "red")]
                reader.put(pages.wrap(lines, self.size.width))

    def action_act(self, verb: str) -> None:
        rows = self._rows_for(verb)
        if not rows:
            return
        act = partial(self._do, verb, [row_ids(row) for row in rows])
        if verb == "cancel":
            width = self.size.width * 9 // 10 - 6  # of a line within the box of `Question`
            self._ask(f"cancel {name_rows(verb, rows, width - len('cancel ?'))}?", act)
        else:
            self._run(act, "acts")

    def _rows_for(self, verb: str) -> list[Row]:
        """Return the marked rows, or the selected one, as far as the action applies; show a notice if to none."""
        targets = self.screen_state.targets
        rows = rows_for(verb, targets)
        if not targets:
            self._chosen()
        elif not rows:
            self._show_notice(describe_refusal(verb, targets))
        return rows

    def action_prioritise(self, by: int) -> None:
        rows = self._rows_for("priority")
        if rows:
            self._run(partial(self._prioritise, [row_ids(row) for row in rows], by), "acts")

    def action_pause(self) -> None:
        question, path = "pause the queue? Running jobs continue, no new ones start.", "/pause"
        if self.screen_state.status.get("paused"):
            question, path = "let jobs start again?", "/unpause"

        def describe(answer: Answer) -> ActionNotice:
            return ActionNotice(
                f"paused: {answer['running']} still running" if answer["paused"] else "jobs start again"
            )

        self._ask(question, partial(self._post, path, None, describe))

    def _ask(self, question: str, act: Work) -> None:
        def answered(is_yes: bool | None) -> None:  # noqa: FBT001 - as a screen hands it back
            if is_yes:
                self._run(act, "acts")
            else:
                self._show_notice(ActionNotice("no job changed"))

        self.push_screen(Question(clean(question), self._spell), answered)

    async def _do(self, verb: str, keys: Sequence[RowKey], **more: object) -> None:
        text = ids_text(keys)
        self._show_notice(ActionNotice(f"{verb} {text}…"))
        body = {"ids": text, **more}
        is_done = await self._post(f"/jobs/{verb}", body, lambda answer: describe_result(verb, answer, **more))
        if is_done and verb != "priority":  # its keys are pressed several times in a row
            self.screen_state.marked = {}
            self._draw("queue")

    async def _post(self, path: str, body: object, describe: Callable[[Answer], ActionNotice]) -> bool:
        ask = self._subscriptions.stream.ask
        try:
            answer = await ask("POST", path, body=body)
            if (second := second_request(path.rpartition("/")[2], answer)) is not None:
                answer = merge(answer, await ask("POST", path, body=second))
            self._show_notice(describe(answer))
        except GpuyardError as error:
            self._show_notice(failed(error))
            return False
        return True

    async def _prioritise(self, keys: Sequence[RowKey], by: int) -> None:
        """Change each priority from what it is now: an earlier key may have changed it meanwhile."""
        async with self._acting:
            changes: dict[int, list[RowKey]] = {}
            for row in filter(None, map(self.screen_state.known_row, keys)):
                changes.setdefault(row["priority"] + by, []).append(row_ids(row))
            for priority, equal in changes.items():
                await self._do("priority", equal, priority=priority)
                for key in equal:
                    self.screen_state.hear_priority(key, priority)
