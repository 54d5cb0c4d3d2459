"""Sizes, durations and times as text, for every view. As GPU vendors do, 1 GB is 1,024 MB and 1 MB is 1,048,576 bytes.
Scripts call commands in loops, so nothing that takes milliseconds (`re`, `datetime`) is imported before it is
needed.
"""

from gpuyard.errors import UserError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

UNKNOWN = "-"

MB = 1048576
_MB_PER_UNIT = {"B": 1 / MB, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1048576.0}
_SIZE = r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:([KMGT])(?:i?B)?|(B))?\s*"

_DAYS, _HOURS, _MINUTES, _SECONDS = r"d(?:ays?)?", r"h(?:ours?|rs?)?", r"m(?:in(?:ute)?s?)?", r"s(?:ec(?:ond)?s?)?"
_NUMBER = r"(\d{1,12}(?:\.\d*)?|\.\d+)"
_DURATION = rf"\s*{_NUMBER}\s*(ms|{_SECONDS}|{_MINUTES}|{_HOURS}|{_DAYS})?\s*"
# `2h30m` or `1d 12h`: each unit once, the largest first.
_SUM_OF_UNITS = rf"\s*(?:(\d{{1,9}})\s*{_DAYS}\s*)?(?:(\d{{1,9}})\s*{_HOURS}\s*)?"
_SUM_OF_UNITS += rf"(?:(\d{{1,9}})\s*{_MINUTES}\s*)?(?:{_NUMBER}\s*{_SECONDS})?\s*"
# `02:00:00`, or `1-12:00:00` with days, as Slurm writes it.
_CLOCK = r"\s*(?:(\d{1,9})-)?(\d{1,9}):([0-5]\d):([0-5]\d)\s*"


def parse_size(text: str) -> float:
    """Return `8G`, `8GB`, `8GiB`, `8000MB` or a bare `8000` (MB) in MB."""
    import re

    match = re.fullmatch(_SIZE, text, re.IGNORECASE | re.ASCII)
    if match is None:
        raise UserError(f"'{text}' is not a size", hint="write it as 8G, 512MB or a number of MB")
    number, scaled, plain = match.groups()
    return float(number) * _MB_PER_UNIT[(scaled or plain or "M").upper()]


def parse_duration(text: str) -> float:
    """Return `30s`, `200ms`, `5 min`, `2h30m`, `1d12h`, `02:00:00` or a bare number of seconds, in seconds."""
    import re

    match = re.fullmatch(_DURATION, text, re.IGNORECASE | re.ASCII)
    if match is not None:
        unit = (match[2] or "s").lower()
        seconds_per_unit = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
        return float(match[1]) * seconds_per_unit[unit if unit == "ms" else unit[0]]
    match = re.fullmatch(_CLOCK, text, re.ASCII) or re.fullmatch(_SUM_OF_UNITS, text, re.IGNORECASE | re.ASCII)
    if match is None or not any(match.groups()):
        raise UserError(
            f"'{text}' is not a time", hint="write it as 30s, 10m, 4h, 2h30m, 02:30:00 or a number of seconds"
        )
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return days * 86400 + hours * 3600 + minutes * 60 + seconds


def format_size(megabytes: float | None) -> str:
    """Return `512 MB`, `13.8 GB` or `24 GB`: below 1 GB in MB; one decimal for GB and below 10 MB, unless it is 0."""
    if megabytes is None:
        return UNKNOWN
    if megabytes >= 1024:
        return f"{format_gigabytes(megabytes)} GB"
    return f"{megabytes:.0f} MB" if megabytes >= 9.95 else f"{_one_decimal(megabytes)} MB"


def format_gigabytes(megabytes: float | None) -> str:
    """Return the number alone, for pairs such as `7.9/24 GB`."""
    return UNKNOWN if megabytes is None else _one_decimal(megabytes / 1024)


def format_bytes(count: float | None) -> str:
    """Return `812 B`, `1.5 KB`, and from 1 MB on the text of `format_size`."""
    if count is None or count >= MB:
        return format_size(None if count is None else count / MB)
    return f"{count:.0f} B" if count < 1024 else f"{_one_decimal(count / 1024)} KB"


def _one_decimal(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def format_duration(seconds: float | None) -> str:
    """Return the two largest units that are not 0: `45s`, `3m 20s`, `4h 5m`, `2d 3h`."""
    if seconds is None:
        return UNKNOWN
    whole = max(0, int(seconds))
    for unit, below, size, part in (("d", "h", 86400, 3600), ("h", "m", 3600, 60), ("m", "s", 60, 1)):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size}{unit} {rest}{below}" if rest else f"{whole // size}{unit}"
    return f"{whole}s"


def format_due(left_s: float) -> str:
    """Return when an estimated moment comes: `in about 3m`, `at any moment`, or `overdue by 3m` once it has passed."""
    if left_s >= 1:
        return f"in about {format_duration(left_s)}"
    return "at any moment" if left_s > -1 else f"overdue by {format_duration(-left_s)}"


def format_time(iso: str | None) -> str:
    """Return an ISO 8601 time of the daemon's answers in this machine's time zone."""
    if iso is None:
        return UNKNOWN
    from datetime import datetime

    return f"{datetime.fromisoformat(iso).astimezone():%Y-%m-%d %H:%M:%S}"


def format_energy(joules: float | None) -> str:
    """Return `850 J`, `12.5 kJ` below 0.01 kWh, else `0.42 kWh`."""
    if joules is None:
        return UNKNOWN
    if joules >= 36_000:
        kwh = joules / 3_600_000
        return f"{kwh:,.0f} kWh" if kwh >= 100 else f"{kwh:.1f} kWh" if kwh >= 10 else f"{kwh:.2f} kWh"
    return f"{joules:.0f} J" if joules < 1000 else f"{_one_decimal(joules / 1000)} kJ"


def format_money(amount: float, currency: str) -> str:
    """Return `1.27 EUR`; an amount below a cent gets more decimals, down to `<0.0001 EUR`."""
    if 0 < amount < 0.0001:
        return f"<0.0001 {currency}"
    return f"{amount:,.2f} {currency}" if amount >= 0.01 or amount == 0 else f"{amount:.4f} {currency}"


def format_co2e(grams: float) -> str:
    """Return `120 g CO2e` or `1.4 kg CO2e`."""
    if grams >= 1000:
        return f"{_one_decimal(grams / 1000)} kg CO2e"
    return f"{grams:.0f} g CO2e" if grams >= 9.95 else f"{grams:.2g} g CO2e"


def format_count(number: int, noun: str) -> str:
    """Return `1 job`, `2 jobs` or `1,200 jobs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_cpu_numbers(cpus: "Iterable[int]") -> str:
    """Return CPU numbers as the kernel writes them, such as `0-3,8`."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
