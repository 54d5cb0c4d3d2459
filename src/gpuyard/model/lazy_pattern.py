"""Regular expressions that are compiled when first used: compiling takes longer than loading a module."""

import re
import sys
from collections.abc import Callable, Iterator
from functools import cached_property


class LazyPattern:
    """A pattern with the methods of `re.Pattern` that we use."""

    def __init__(self, text: str, flags: int = 0) -> None:
        self._text, self._flags = text, flags

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self._text, self._flags)

    def search(self, text: str, start: int = 0, end: int = sys.maxsize) -> re.Match[str] | None:
        return self._compiled.search(text, start, end)

    def match(self, text: str) -> re.Match[str] | None:
        return self._compiled.match(text)

    def fullmatch(self, text: str) -> re.Match[str] | None:
        return self._compiled.fullmatch(text)

    def finditer(self, text: str) -> Iterator[re.Match[str]]:
        return self._compiled.finditer(text)

    def sub(self, by: str | Callable[[re.Match[str]], str], text: str) -> str:
        return self._compiled.sub(by, text)
