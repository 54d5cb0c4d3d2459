"""Propose limits for a batch by a log of samples, of `gpuyard watch --log` or of a batch's `--sample-log`: a run starts
only while the machine is no busier than in 95% of the samples. Of several GPUs, the busiest one decides.
"""

import csv
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, ValidationError, convert

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.units import format_count

_HINT = "give a file that `gpuyard watch --log FILE` has written"


class _Figure(Struct, frozen=True):
    """What an option limits, and the figure's column in the log of `gpuyard watch` and in that of a batch. `sign`: -1
    for a limit from below."""

    option: str
    kind: str
    what: str
    unit: str
    column: str
    batch_column: str
    sign: int = 1


_SMOOTHED = "utilization_smoothed_percent"
_FIGURES = (
    _Figure("--max-cpu", "host", "smoothed CPU use", "%", _SMOOTHED, "cpu_smoothed_percent"),
    _Figure("--min-free-mem-mb", "host", "available RAM", " MB", "memory_free_mb", "memory_available_mb", -1),
    _Figure("--max-gpu", "device", "smoothed use", "%", _SMOOTHED, "gpu_smoothed_percent"),
    _Figure("--max-gpu-mem-mb", "device", "memory in use", " MB", "memory_used_mb", "gpu_memory_used_mb"),
)


class ProposedLimit(Struct, frozen=True, kw_only=True):
    """`value` is None if the log does not have the figure."""

    option: str
    value: int | None
    why: str


def read_sample_log(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text().splitlines()
        if lines and lines[0].startswith("{"):
            return convert(list(map(json.loads, lines)), list[dict[str, Any]])
        return list(csv.DictReader(lines))
    except OSError as error:
        raise EnvironmentFault(f"cannot read '{path}': {error.strerror}", hint=_HINT) from error
    except ValueError as error:
        raise UserError(f"'{path}' is not a log of samples: {error}", hint=_HINT) from error


def propose_limits(rows: Iterable[Mapping[str, Any]]) -> list[ProposedLimit]:
    values: dict[str, dict[str, list[float]]] = {figure.option: defaultdict(list) for figure in _FIGURES}
    for row in rows:
        is_of_batch = "event" in row  # a row of a batch has figures of the host and of a device
        for figure in _FIGURES:
            text = row.get(figure.batch_column if is_of_batch else figure.column)
            if text not in (None, "") and (is_of_batch or row.get("kind") == figure.kind):
                device = "" if figure.kind == "host" else str(row.get("device") or row.get("id"))
                try:
                    values[figure.option][device].append(convert(text, float, strict=False))
                except ValidationError as error:
                    raise UserError(f"the log has '{text}' for a number", hint=_HINT) from error
    if not any(values.values()):
        raise UserError("the log has no samples of CPU, RAM or GPUs", hint=_HINT)
    return [_propose(figure, values[figure.option]) for figure in _FIGURES]


def _propose(figure: _Figure, values: Mapping[str, list[float]]) -> ProposedLimit:
    if not values:
        return ProposedLimit(option=figure.option, value=None, why=f"no {figure.option}: its figure is not in the log")
    # Each device's smallest value that 95% of its values do not exceed.
    signed = {device: sorted(figure.sign * each for each in found) for device, found in values.items()}
    bounds = {device: found[math.ceil(0.95 * len(found)) - 1] for device, found in signed.items()}
    device = max(bounds, key=lambda each: bounds[each])
    bound = figure.sign * bounds[device]
    where = f" of GPU {device}" + (", the highest" if len(values) > 1 else "") if device else ""
    why = (
        f"{figure.what}{where}: {bound:.1f}{figure.unit} or {'less' if figure.sign > 0 else 'more'}"
        f" in 95% of {format_count(len(values[device]), 'sample')}"
    )
    value = math.ceil(bound) if figure.sign > 0 else math.floor(bound)
    return ProposedLimit(option=figure.option, value=value, why=why)
