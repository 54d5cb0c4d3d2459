"""The points of a sweep: what `--sweep` and `--sample` say, and whether the placeholders of the command fit them."""

import hashlib
import itertools
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import ROUND_HALF_EVEN, Decimal, localcontext
from typing import NamedTuple

from gpuyard.errors import UserError
from gpuyard.model.option_values import Options
from gpuyard.model.placeholders import ArrayElement, check_known, nearest, used_names

SWEEP_PREFIX = "GPUYARD_SWEEP_"
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_WHOLE_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})", re.ASCII)
_NUMBER = r"[+-]?\d{1,15}(?:\.\d{1,15})?(?:[eE][+-]?\d{1,3})?"
_BEGINS_AS_RANGE = re.compile(rf"{_NUMBER}\.\.", re.ASCII)
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(?::(?:(lin|log)(\d{{1,9}})|({_NUMBER})))?", re.ASCII)
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
_HINT = "write a range as 0..4, 0..100:25, 0..1:lin5 or 1e-4..1e-1:log4"
_PRECISION = 50


class Values(NamedTuple):
    """Some values in a row, computed one by one: a range may be very long."""

    size: int
    value: Callable[[int], str]


class Axis(NamedTuple):
    """All values of one name; `starts` are the positions of the first value of each part."""

    name: str
    parts: tuple[Values, ...]
    starts: tuple[int, ...]
    size: int

    def value(self, at: int) -> str:
        part = bisect_right(self.starts, at) - 1
        return self.parts[part].value(at - self.starts[part])


def parse_axes(texts: Sequence[str]) -> list[Axis]:
    """Return the axes of `NAME=VALUES` texts, in order."""
    axes: list[Axis] = []
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not _NAME.fullmatch(name) or not values or any(axis.name == name for axis in axes):
            raise UserError(f"'{text}' is not a sweep", hint="write it once for each name: --sweep lr=1e-3,1e-4")
        parts = tuple(_parse_values(word) for word in values.split(","))
        starts = tuple(itertools.accumulate((part.size for part in parts), initial=0))
        axes.append(Axis(name, parts, starts[:-1], starts[-1]))
    refuse_alike([axis.name for axis in axes])
    return axes


def refuse_alike(names: Sequence[str]) -> None:
    """Refuse names that differ only in capitals: they would share one environment variable."""
    known: dict[str, str] = {}
    for name in names:
        other = known.setdefault(name.upper(), name)
        if other != name:
            raise UserError(
                f"'{other}' and '{name}' differ only in capitals, and both would be ${variable_of(name)}",
                hint="give one of them another name",
            )


def variable_of(name: str) -> str:
    """Return the environment variable that a job has for a value."""
    return SWEEP_PREFIX + name.upper()


def count_points(axes: Sequence[Axis]) -> int:
    return math.prod(axis.size for axis in axes)


def all_points(axes: Sequence[Axis]) -> Iterator[dict[str, str]]:
    """Yield the values of each combination; the last name varies fastest."""
    names = [axis.name for axis in axes]
    for point in itertools.product(*([axis.value(at) for at in range(axis.size)] for axis in axes)):
        yield dict(zip(names, point, strict=True))


def sample_points(axes: Sequence[Axis], count: int, seed: int) -> Iterator[dict[str, str]]:
    """Yield `count` different combinations, at most all, in the order of `all_points`, by Floyd's algorithm."""
    chosen: set[int] = set()
    total = count_points(axes)
    for most in range(max(0, total - count), total):
        digest = hashlib.sha256(f"{seed}:{most}".encode()).digest()
        drawn = int.from_bytes(digest[:24], "big") % (most + 1)
        chosen.add(most if drawn in chosen else drawn)
    for place in sorted(chosen):
        left, point = place, dict[str, str]()
        for axis in reversed(axes):
            left, at = divmod(left, axis.size)
            point[axis.name] = axis.value(at)
        yield {axis.name: point[axis.name] for axis in axes}


def _parse_values(word: str) -> Values:
    """Return the values of a range; any other text, such as `1e-4` or `../data`, is one value."""
    whole = _WHOLE_RANGE.fullmatch(word)
    if whole is not None:
        first, last = int(whole[1]), int(whole[2])
        if last < first:
            raise UserError(f"'{word}' is not a range that can be swept", hint="write it as 0..4, or downwards as 4..0")
        return _whole_numbers(first, last)
    if _BEGINS_AS_RANGE.match(word) is None:
        return Values(1, lambda _: word)
    match = _RANGE.fullmatch(word)
    if match is None:
        raise UserError(f"'{word}' is not a range that can be swept", hint=_HINT)
    first_text, last_text, spacing, count, step = match.groups()
    if spacing is not None:
        return _spaced(word, (first_text, last_text), int(count), is_log=spacing == "log")
    if step is not None:
        return _steps(word, (first_text, last_text), step)
    if _WHOLE.fullmatch(first_text) and _WHOLE.fullmatch(last_text):
        return _whole_numbers(int(first_text), int(last_text))
    raise UserError(
        f"'{word}' does not say how many values it has", hint=f"such as {word}:lin5, {word}:log4 or a step, {word}:0.1"
    )


def _whole_numbers(first: int, last: int) -> Values:
    sign = 1 if last >= first else -1
    return Values(abs(last - first) + 1, lambda at: str(first + sign * at))


def _steps(word: str, ends: tuple[str, str], step: str) -> Values:
    first, last, by = Decimal(ends[0]), Decimal(ends[1]), Decimal(step)
    if by <= 0:
        raise UserError(
            f"the step of '{word}' is not above 0", hint="a range downwards has a positive step too: 4..0:2"
        )
    with localcontext(prec=_PRECISION):
        reach = abs(last - first) / by
    if reach >= 10**15:
        raise UserError(f"'{word}' has too many values", hint="write a larger step")
    count, sign = int(reach) + 1, 1 if last >= first else -1
    write = _writer(ends)

    def value(at: int) -> str:
        with localcontext(prec=_PRECISION):
            number = first + sign * at * by
        return ends[0] if at == 0 else ends[1] if number == last else write(number)

    return Values(count, value)


def _spaced(word: str, ends: tuple[str, str], count: int, *, is_log: bool) -> Values:
    first, last = Decimal(ends[0]), Decimal(ends[1])
    if count < 2 or first == last:
        raise UserError(f"'{word}' needs two different ends and at least 2 values", hint=_HINT)
    if count > 100_000:
        raise UserError(f"'{word}' has too many values", hint="write at most 100,000, or a step")
    if is_log and not (first > 0 and last > 0):
        raise UserError(f"both ends of '{word}' have to be above 0", hint="logarithms of other numbers do not exist")
    write, steps = _writer(ends), count - 1
    with localcontext(prec=_PRECISION):
        growth = (last / first).ln() / steps if is_log else Decimal(0)
        # Enough digits to tell neighbours apart, and of a ratio at least 4.
        digits = max(4, 4 - (growth.exp() - 1).adjusted()) if is_log else 6
        step = ((last - first) / steps).adjusted()

    def value(at: int) -> str:
        if at in (0, steps):
            return ends[0] if at == 0 else ends[1]
        with localcontext(prec=_PRECISION):
            number = first * (growth * at).exp() if is_log else first + (last - first) * at / steps
            unit = Decimal(1).scaleb((number.adjusted() if is_log else step) - digits + 1)
            number = number.quantize(unit, ROUND_HALF_EVEN)
        return write(number)

    return Values(count, value)


def _writer(ends: tuple[str, str]) -> Callable[[Decimal], str]:
    exponents = sum("e" in end.lower() for end in ends)

    def write(number: Decimal) -> str:
        if number == 0:
            return "0"
        is_plain = exponents == 0 or (exponents == 1 and Decimal("0.001") <= abs(number) < 10_000)
        with localcontext(prec=_PRECISION):
            trimmed = number.normalize()
        if is_plain:
            return f"{trimmed:f}"
        power = trimmed.adjusted()
        return f"{trimmed.scaleb(-power):f}e{power}"

    return write


def check_placeholders(command: Sequence[str], options: Options, elements: Iterable[ArrayElement]) -> None:
    """Refuse placeholders without a value, and values of a sweep that nothing uses. A column of a table need not be
    used, and the runs of a batch may share a command."""
    texts = [*command, *options["env"]]
    if "concurrency" in options:
        return
    if "array" in options:
        check_known(texts, ["index"], "--array")
        return
    names = list(next(iter(elements)).values)
    refuse_alike(names)
    if names:
        check_known(texts, names, "--sweep" if options["sweep"] else "the CSV file")
    if options["sweep"]:
        files = filter(None, (options["output"], options["error"]))
        mentioned = [f"{{{name}}}" for name in names if any(variable_of(name) in text for text in texts)]
        used = used_names([*texts, *files, *mentioned])
        if (unused := next((name for name in names if name not in used), None)) is not None:  # its jobs would be alike
            near = nearest(unused, [name for name in used if name not in names])
            meant = "" if near is None else f"; did you mean {{{unused}}} instead of {{{near}}}?"
            raise UserError(
                f"no placeholder uses the values of --sweep {unused}{meant}",
                hint=f"write {{{unused}}} into the command, or --env {unused.upper()}={{{unused}}}",
            )


def varying_names(elements: Sequence[ArrayElement]) -> tuple[str, ...]:
    """Return the names of the values that differ between the jobs."""
    first = elements[0].values
    return tuple(name for name in first if any(each.values[name] != first[name] for each in elements))
