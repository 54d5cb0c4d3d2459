"""Parse the process lists that `amd-smi` prints below the cards: those of `monitor -q` and of the box.

Rules:
- Each function returns the processes by the number of their card, in the shape of the JSON of `amd-smi process`.
- A card without processes has an empty list. A card is left out if one of its rows cannot be read, or if the
  list is truncated: its processes are unknown.
- A name may contain spaces, so the columns after it are counted from the end of the row.
- In a list with times (`monitor -w`) the last time of each card counts.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpuyard.probes.amd.tool_output import cells, csv_rows

ProcessLists = dict[str, list[dict[str, Any]]]

_BOX_TITLES = ["GPU", "PID", "Process", "Name"]
_TABLE_TITLES = ["gpu", "name", "pid"]
_NONE_RUNNING = "no running process"


def is_process_header(titles: Sequence[str]) -> bool:
    """Return whether the lower-case titles are the header of the list of `monitor -q`."""
    return [title for title in titles if title != "timestamp"][:3] == _TABLE_TITLES


def processes_of_table(titles: Sequence[str], lines: Iterable[str]) -> ProcessLists:
    """Read the rows below the header of `monitor -q`."""
    gpu_place, behind_name = titles.index("gpu"), titles[titles.index("pid") :]
    lists = _Lists()
    for line in lines:
        words = line.split(maxsplit=gpu_place + 1)
        if len(words) <= gpu_place or not words[gpu_place].isdecimal():
            break
        row = cells(words[gpu_place + 1]) if len(words) > gpu_place + 1 else []
        fields: dict[str, str] = {}
        if len(row) > len(behind_name):
            fields = dict(zip(behind_name, row[-len(behind_name) :], strict=True))
            fields["name"] = " ".join(row[: -len(behind_name)])
        lists.add(words[gpu_place], words[0] if gpu_place else "", fields)
    return lists.readable()


def processes_of_csv(lines: Iterable[str]) -> ProcessLists:
    """Read the list below the cards in the CSV of `monitor -q`, which has a header of its own."""
    lists = _Lists()
    titles: list[str] = []
    for row in csv_rows(lines):
        if "gpu" in row and not {"pid", "process_info"}.isdisjoint(row):
            titles, lists = row, _Lists()
        elif titles:
            gpu_place = titles.index("gpu")
            if len(row) <= gpu_place:
                return {}
            fields = dict(zip(titles, row, strict=True)) if len(row) == len(titles) else {}
            lists.add(row[gpu_place], row[0] if gpu_place else "", fields)
    return lists.readable()


def processes_of_box(boxes: Sequence[str], gpus: Iterable[str]) -> ProcessLists:
    """Parse the list of all cards at the end of the box; cards without processes are not in it."""
    start = next((number for number, line in enumerate(boxes) if cells(line)[:4] == _BOX_TITLES), len(boxes))
    end = next((number for number in range(start, len(boxes)) if boxes[number].startswith("+")), None)
    if end is None:
        return {}
    lists = _Lists(gpus)
    titles = [title.lower() for title in cells(boxes[start])[4:]]
    for row in (cells(line) for line in boxes[start + 1 : end]):
        if row and row[0].isdecimal():
            fields = {"pid": row[1] if len(row) > 1 else ""}
            if len(row) >= len(titles) + 3:
                fields |= zip(titles, row[len(row) - len(titles) :], strict=True)
                fields["name"] = " ".join(row[2 : len(row) - len(titles)])
            lists.add(row[0], "", fields)
    return lists.readable()


class _Lists:
    """The processes of each card by pid, and the cards with an unreadable row."""

    def __init__(self, gpus: Iterable[str] = ()) -> None:
        self._found: dict[str, dict[str, dict[str, Any]]] = {gpu: {} for gpu in gpus}
        self._times: dict[str, str] = {}
        self._unreadable: set[str] = set()

    def add(self, gpu: str, time: str, fields: Mapping[str, str]) -> None:
        if self._times.setdefault(gpu, time) != time:
            self._times[gpu], self._found[gpu] = time, {}
            self._unreadable.discard(gpu)
        processes = self._found.setdefault(gpu, {})
        pid = fields.get("pid", "")
        if pid.isdecimal():
            processes.setdefault(pid, _process(fields))
        elif not _says_none(fields):
            self._unreadable.add(gpu)

    def readable(self) -> ProcessLists:
        return {gpu: [*found.values()] for gpu, found in self._found.items() if gpu not in self._unreadable}


def _process(fields: Mapping[str, str]) -> dict[str, Any]:
    return {
        "pid": fields["pid"],
        "name": fields.get("name"),
        "memory_usage": {key: fields.get(key) for key in ("gtt_mem", "cpu_mem", "vram_mem")},
        "mem_usage": fields.get("mem_usage", fields.get("mem_usg")),
    }


def _says_none(fields: Mapping[str, str]) -> bool:
    """Return whether the row means that the card has no processes: "N/A" in each column, or a text."""
    said = fields.get("process_info", "").lower().startswith(_NONE_RUNNING)
    return said or (fields.get("pid") == "N/A" and fields.get("name") == "N/A")
