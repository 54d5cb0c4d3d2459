"""Options as they were typed, made into values; what cannot be one is told as the mistake it is."""

from typing import Any

from gpuyard.core.units import parse_duration, parse_size
from gpuyard.errors import UserError


class Options:
    """What was typed, by its name; each is taken once, and whatever nobody takes is not known."""

    def __init__(self, typed: dict[str, Any]) -> None:
        self._typed = typed
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self._typed.get(name) is not None

    def text(self, name: str) -> str | None:
        value = self._take(name)
        if isinstance(value, bool | list | dict):
            raise UserError(f"--{name} takes one value")
        return None if value is None else str(value)

    def texts(self, name: str) -> list[str]:
        value = self._take(name)
        if value is None:
            return []
        values = value if isinstance(value, list) else [value]
        if any(isinstance(each, bool | list | dict | None) for each in values):
            raise UserError(f"--{name} takes a value, or a list of them")
        return [str(each) for each in values]

    def flag(self, name: str) -> bool:
        value = self._take(name)
        if not isinstance(value, bool | None):
            raise UserError(f"--{name} takes no value")
        return bool(value)

    def whole(self, name: str, default: int, *, least: int, most: int = 1_000_000_000) -> int:
        text = self.text(name)
        if text is None:
            return default
        try:
            value = int(text)
        except ValueError:
            raise UserError(f"--{name} takes a whole number, not '{text}'") from None
        if not least <= value <= most:
            raise UserError(f"--{name} {value} is out of range", hint=f"give it from {least} to {most:,}")
        return value

    def number(self, name: str) -> float | None:
        text = self.text(name)
        try:
            value = None if text is None else float(text)
        except ValueError:
            raise UserError(f"--{name} takes a number, not '{text}'") from None
        if value is not None and not 0 <= value < float("inf"):
            raise UserError(f"--{name} {text} is out of range", hint="give it 0 or more")
        return value

    def size(self, name: str) -> float | None:
        text = self.text(name)
        size = None if text is None else parse_size(text)
        if size is not None and not 0 < size < float("inf"):
            raise UserError(f"--{name} {text} is out of range", hint="give it at least 1M")
        return size

    def seconds(self, name: str, *, may_be_zero: bool = False) -> float | None:
        text = self.text(name)
        seconds = None if text is None else parse_duration(text)
        if seconds == 0 and not may_be_zero:
            raise UserError(f"--{name} is no time at all", hint="write it as 30s, 10m or 4h")
        return seconds

    def choice(self, name: str, kinds: Any) -> Any:
        text = self.text(name)
        if text is None:
            return None
        try:
            return kinds(text)
        except ValueError:
            raise UserError(f"--{name} cannot be '{text}'", hint=f"it can be {', '.join(kinds)}") from None

    def refuse_the_rest(self) -> None:
        strange = sorted(set(self._typed) - self._taken)
        if strange:
            raise UserError(f"there is no option '{strange[0]}'", hint="see `gpuyard submit --help`")

    def _take(self, name: str) -> Any:
        self._taken.add(name)
        return self._typed.get(name)
