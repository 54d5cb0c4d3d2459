"""Reads one line of output, or of the progress file: how much of what is done, the time left, and named figures.

Known are the bars of tqdm, Rich, Keras, Lightning, the Hugging Face Trainer, fastprogress, progressbar2,
alive-progress, enlighten and click, and texts such as `Epoch [3/10], Step [120/400]`, `iteration 120/ 4000 |`, `Train
Epoch: 3 [640/60000 (1%)]`, `[ 40%]` and `[12/345]`. A number without such a sign, as in `accuracy: 91%`, is no
progress. The file that `GPUYARD_PROGRESS` names has one line such as `120/4000 loss=0.12 left=60 unit=step`:
`done/total`, `done` alone or a percentage, then names and numbers. A line that does not begin like this says nothing.
"""

import math
import re

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.model.job_progress import MOST_FIGURES, ProgressReading, WorkDone
from gpuyard.model.lazy_pattern import LazyPattern
from gpuyard.model.printable_text import printable

LONGEST_NAME = 32
LARGEST_TOTAL = 1e15

# Units that contain other units: a fold has epochs, an epoch has steps.
_OUTERMOST = ("fold", "trial", "seed", "experiment", "run")
_OUTER = ("epoch", "round", "episode", "generation")
_INNER = (
    "step", "iteration", "iter", "it", "batch", "frame", "sample", "example", "image", "file", "update", "stage",
    "phase", "chunk", "block", "task", "item", "tick", "page", "scene", "record", "sequence", "token", "minibatch",
)  # fmt: skip
_UNITS = "|".join((*_OUTERMOST, *_OUTER, *_INNER))
_NUMBER = r"\d[\d,]{0,24}(?:\.\d{1,12})?[kKMGT]?"
_OF = r"\s*(?:/|\bof\b|\bout of\b)\s*"
_ANY_OF = LazyPattern(rf"[\dkmgt]{_OF}\d", re.IGNORECASE)  # which is found faster
_WORD_FIRST = LazyPattern(
    rf"\b({_UNITS})(?:e?s)?\b[\s:=#(\[|-]{{0,12}}({_NUMBER}){_OF}({_NUMBER})(?![\w/]|[.:]\d)", re.IGNORECASE
)
_WORD_LAST = LazyPattern(rf"(?<![\d/.,:-])({_NUMBER}){_OF}({_NUMBER})\s+({_UNITS})(?:e?s)?\b", re.IGNORECASE)
_WORD_ALONE = LazyPattern(
    rf"\b({'|'.join(_OUTER)})(?:\(\w+\))?[\s:=#\[]{{1,3}}(\d+)\b(?![.\d]|{_OF}\d|\])|"
    rf"\b({'|'.join(_OUTER)})(?:\(\w+\))?\s*\[(\d+)\](?=\s*\[)",
    re.IGNORECASE,
)
_FRACTION = LazyPattern(rf"(?<![\w/.,:-])({_NUMBER}){_OF}({_NUMBER})(?![\w/:-]|\.\d)")
_PERCENT = LazyPattern(r"(?<![\d.])(\d{1,3}(?:\.\d+)?)\s?%")
_BAR = LazyPattern(r"[█▉▊▋▌▍▎▏━╸╺▓▒░■▇▆▅▄▃▂▁⣿]|[|\[][#=>.\- ]{4,}[|\]]|%\|")
_LONG_BAR = LazyPattern(r"([█━╸#=>.\- ])\1{7,}")
_BRACKETED_PERCENT = LazyPattern(r"^\s*\[\s*(\d{1,3})%\s*\]")
_SPOKEN_PERCENT = LazyPattern(
    r"\bprogress\s*[:=]?\s*(\d{1,3}(?:\.\d+)?)\s?%|\b(\d{1,3}(?:\.\d+)?)\s?%\s*(?:complete|completed|done|finished)\b",
    re.IGNORECASE,
)
_BRACKETED = LazyPattern(rf"^\s*[\[(]\s*({_NUMBER})\s*/\s*({_NUMBER})\s*[\])]")
_AFTER_EPOCH = LazyPattern(rf"\[\s*({_NUMBER})\s*/\s*({_NUMBER})\s*(?:\(\s*\d+(?:\.\d+)?%\s*\))?\s*\]")
_TIME = r"(?:(\d+) days?, )?(?:(\d+):)?(\d{1,3}):(\d\d)(?:\.\d+)?"
_LEFT = LazyPattern(rf"(?:<\s*|\beta\W{{1,3}}){_TIME}", re.IGNORECASE)
_LEFT_AT_END = LazyPattern(rf"(?:^|\s){_TIME}\s*$")
_RATE = LazyPattern(r"[\d.?]+\s?([A-Za-z]{1,16})/s\b|s/([A-Za-z]{1,16})\b")

_VALUE = r"([-+]?(?:\d[\d,]{0,24}(?:\.\d{0,24})?|\.\d+)(?:[eE][-+]?\d+)?|[-+]?nan|[-+]?inf(?:inity)?)(%?)"
_PAIR = LazyPattern(
    r"(?<![\w./-])['\"]?([A-Za-z][\w./@-]{0,60}(?: [A-Za-z][\w]{1,20})?)['\"]?"
    rf"(?:\s*=\s*|\s*:\s+|:(?=\d+\.\d))['\"]?{_VALUE}"
    r"(?![\w:/%|]|\.\d)",
    re.IGNORECASE,
)
_SPACED_PAIR = LazyPattern(rf"\b((?:\w+[_ ])?(?:loss|accuracy|acc|ppl|perplexity))\s+{_VALUE}(?![\w:/])", re.IGNORECASE)
# Names that are taken for figures on lines without a counter, too.
_METRIC = LazyPattern(
    r"(?:^|[_./ -])(?:loss|acc|accuracy|top\d|f1|auc|auroc|ap|map|map50|mse|rmse|mae|l1|l2|r2|ppl|perplexity|bleu|"
    r"rouge\w*|iou|miou|dice|reward|return|psnr|ssim|lpips|fid|lr|learning[_ ]rate|grad_norm|error|wer|cer|score|elbo|"
    r"kl|nll|precision|recall|bpb|logloss|entropy)\d*$|^(?:val|valid|validation|train|training|eval|test)[_./ -]\w",
    re.IGNORECASE,
)
_NO_FIGURES = LazyPattern(
    r"^(?:.*\s)?(?:epochs?|steps?|iter\w*|it|batch\w*|eta|time|elapsed(?: time)?|date|v_num|pid|port|rank|seed|gpus?|"
    r"cuda|device|line|version|round|fold|trial|run|global_step|job|task|(?:num|max|min|n)_\w+|total|remaining|\w*(?:runtime|per_second)|"
    r"world_size|size|exit|code|status|samples|node|host|warning|error code)$",
    re.IGNORECASE,
)


class Count(Struct, frozen=True, kw_only=True):
    """How much of something a line says is done. `rank` is lower for units that contain others. `label` tells bars of
    the same unit apart. `is_ordinal`: `done` is the number of the one that runs now, or ended last."""

    unit: str
    rank: int
    done: float
    total: float | None
    label: str = ""
    is_bar: bool = False
    is_ordinal: bool = False
    is_from_zero: bool = False


class LineReading(Struct, frozen=True, kw_only=True):
    """`counts` are in order, the outer one first. `figures` that are no finite number are None."""

    counts: tuple[Count, ...] = ()
    left_s: float | None = None
    figures: tuple[tuple[str, float | None], ...] = ()


_NOTHING = LineReading()


def read_line(line: str) -> LineReading:
    """Read a line without escape sequences."""
    if not any(map(str.isdigit, line)) and "nan" not in line.lower() and "inf" not in line.lower():
        return _NOTHING
    line = _LONG_BAR.sub(r"\1\1\1\1", line)  # shorter lines are read faster
    words, rest = _word_counts(line)
    bar = _bar_count(line, rest)
    if bar is None and not words:
        bar = _plain_count(line)
    if bar is not None or "[" in rest:
        alone = _lone_epoch(line) if not any(count.rank < 2 for count in words) else None
        if alone is not None:
            inside = replace(bar, unit="", rank=2) if bar is not None else _fraction(_AFTER_EPOCH.search(rest))
            words, bar = ([*words, alone] if inside is not None else words), inside
    counts = sorted([*words, *([bar] if bar is not None else [])], key=lambda count: count.rank)
    left_s, figures = _left_s(line) if counts else None, _figures(line, has_count=bool(counts))
    return LineReading(counts=tuple(counts[:3]), left_s=left_s, figures=figures)


def _word_counts(line: str) -> tuple[list[Count], str]:
    """Return counts with their unit, such as `Epoch 3/10`, and the line without them."""
    if not _ANY_OF.search(line):
        return [], line
    found: list[Count] = []
    for match in _WORD_FIRST.finditer(line):
        found += _counted(match[1], match[2], match[3], is_ordinal=True)
    rest = _WORD_FIRST.sub(" ", line)
    for match in _WORD_LAST.finditer(rest):
        found += _counted(match[3], match[1], match[2], is_ordinal=False)
    if found and "•" in line and "━" in line:  # Lightning's Rich bar counts epochs from 0, and names the last one
        found = [
            replace(each, total=(each.total or 0) + 1, is_from_zero=True, is_ordinal=False) if each.rank == 1 else each
            for each in found
        ]
    return found, _WORD_LAST.sub(" ", rest)


def _counted(word: str, done: str, total: str, *, is_ordinal: bool) -> list[Count]:
    unit = _unit(word)
    rank = _rank(unit)
    # A step is mostly printed once it is done; an epoch mostly when it begins.
    is_ordinal = is_ordinal and rank < 2
    found = _amounts(done, total)
    return [Count(unit=unit, rank=rank, done=found[0], total=found[1], is_ordinal=is_ordinal)] if found else []


def _bar_count(line: str, rest: str) -> Count | None:
    """Return the count of a line with a drawn bar: its fraction, else its percentage."""
    if not _BAR.search(line):
        return None
    percent, label = _PERCENT.search(rest), _label(rest)
    for match in _FRACTION.finditer(rest):
        numbers = _amounts(match[1], match[2])
        if numbers is not None:
            unit = _bar_unit(label, line)
            return Count(unit=unit, rank=_rank(unit), done=numbers[0], total=numbers[1], label=label, is_bar=True)
    if percent is None or float(percent[1]) > 100 or "%|" in rest:  # the last: the line is not whole yet
        return None
    return Count(unit="%", rank=2, done=float(percent[1]), total=100.0, label=label, is_bar=True)


def _plain_count(line: str) -> Count | None:
    """Return the count of `[ 40%]`, `[12/345]` or `40% done`."""
    match = _BRACKETED_PERCENT.match(line) or _SPOKEN_PERCENT.search(line)
    if match is not None:
        percent = float(next(filter(None, match.groups())))
        return Count(unit="%", rank=2, done=percent, total=100.0, is_bar=True) if percent <= 100 else None
    return _fraction(_BRACKETED.match(line), is_bar=True)


def _fraction(match: re.Match[str] | None, *, is_bar: bool = False) -> Count | None:
    numbers = None if match is None else _amounts(match[1], match[2])
    return None if numbers is None else Count(unit="", rank=2, done=numbers[0], total=numbers[1], is_bar=is_bar)


def _lone_epoch(line: str) -> Count | None:
    """Return the number of an epoch whose total is not given, as in `Epoch 3:  40%|████`, Lightning's bar."""
    match = _WORD_ALONE.search(line)
    if match is None:
        return None
    unit, number, is_from_zero = _unit(match[1] or match[3]), float(match[2] or match[4]), "%|" in line
    return Count(unit=unit, rank=1, done=number, total=None, is_ordinal=not is_from_zero, is_from_zero=is_from_zero)


def _amounts(*texts: str) -> tuple[float, float] | None:
    scales = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
    done, total = (
        float(text.rstrip("kKMGT").replace(",", "")[:32] or "nan") * scales.get(text[-1], 1.0) for text in texts
    )
    return (done, total) if 0 <= done <= total and 0 < total <= LARGEST_TOTAL else None


def _unit(word: str) -> str:
    word = word.lower()
    return {"iter": "iteration", "it": "step"}.get(word, word)


def _rank(unit: str) -> int:
    return 0 if unit in _OUTERMOST else 1 if unit in _OUTER else 2


def _label(rest: str) -> str:
    """Return the text before the bar, without its numbers."""
    before = re.split(r"[\d|\[█▉▊▋▌▍▎▏━╸╺▓▒░#]", rest, maxsplit=1)[0]
    return printable(before.strip(" :-.…"), LONGEST_NAME).lower()


def _bar_unit(label: str, line: str) -> str:
    words = [word.removesuffix("es" if word.endswith("ches") else "s") for word in re.findall(r"[a-z]+", label)]
    if rate := _RATE.search(line):
        words.append((rate[1] or rate[2]).lower().removesuffix("s"))
    return next((_unit(word) for word in words if word in (*_OUTERMOST, *_OUTER, *_INNER)), "")


def _left_s(line: str) -> float | None:
    """Return the time left that the line tells."""
    match = _LEFT.search(line) or _LEFT_AT_END.search(line)
    if match is None:
        return None
    days, hours, minutes, seconds = (float((text or "0")[:9]) for text in match.groups())
    left_s = 86_400 * days + 3600 * hours + 60 * minutes + seconds
    return left_s if left_s <= 366 * 86_400.0 else None


def _figures(line: str, *, has_count: bool) -> tuple[tuple[str, float | None], ...]:
    if "=" not in line and ":" not in line and "loss" not in line.lower() and "acc" not in line.lower():
        return ()
    found: dict[str, float | None] = {}
    for match in (*_PAIR.finditer(line), *_SPACED_PAIR.finditer(line)):
        name = match[1].strip()
        if len(found) >= MOST_FIGURES:
            break
        if _NO_FIGURES.match(name) or not (has_count or _METRIC.search(name)):
            continue
        value = float(match[2].replace(",", "")[:40])
        found.setdefault(printable(name, LONGEST_NAME), value if math.isfinite(value) else None)
    return tuple(found.items())


VARIABLE = "GPUYARD_PROGRESS"
LONGEST_FILE = 4096
_FIRST = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)(?:(%)|/(\d{1,20}(?:\.\d{1,20})?))?")


def read_progress_line(text: str) -> ProgressReading | None:
    """Return what the first line of the file says, or None if it cannot be read."""
    words = text.partition("\n")[0].split()
    match = _FIRST.fullmatch(words[0]) if words else None
    if match is None:
        return None
    done = float(match[1])
    total = 100.0 if match[2] else float(match[3]) if match[3] else None
    if done > LARGEST_TOTAL or (total is not None and not 0 < total <= LARGEST_TOTAL):
        return None
    left_s, unit, figures = None, "%" if match[2] else "", dict[str, float | None]()
    for name, _, value in (word.partition("=") for word in words[1:]):
        if name == "unit":
            unit = printable(value, LONGEST_NAME)
            continue
        try:
            number = float(value[:40])  # may be nan or inf
        except ValueError:
            continue
        if name == "left":
            left_s = number if 0 <= number < LARGEST_TOTAL else None
        elif name and len(figures) < MOST_FIGURES:
            figures[printable(name, LONGEST_NAME)] = number if math.isfinite(number) else None
    amount = WorkDone(done=done if total is None else min(done, total), total=total, unit=unit, left_s=left_s)
    return ProgressReading(amount=amount, figures=(tuple(figures.items()),) if figures else (), is_told=True)
