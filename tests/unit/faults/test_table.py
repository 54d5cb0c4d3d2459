"""Every fault can be planted, and its near tests exist."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

from tests.faults.table import ALL, AREAS

ROOT = Path(__file__).parents[3]


@cache
def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_ids_are_unique_and_begin_with_their_area() -> None:
    assert [each for each, count in Counter(fault.id for fault in ALL).items() if count > 1] == []
    assert [fault.id for area, faults in AREAS.items() for fault in faults if not fault.id.startswith(f"{area}-")] == []


def test_a_fault_changes_exactly_one_place_of_a_file_and_the_file_still_compiles() -> None:
    for fault in ALL:
        source = text_of(fault.file)
        broken = fault.applied_to(source)  # raises unless its old text occurs exactly once
        assert broken != source, fault.id
        if fault.file.endswith(".py"):
            ast.parse(broken, fault.id)


def test_a_fault_describes_what_breaks_in_a_sentence() -> None:
    assert [fault.id for fault in ALL if not re.fullmatch(r"[A-Z`-].+\.", fault.breaks)] == []


def test_near_tests_exist() -> None:
    assert [fault.id for fault in ALL if not fault.near] == []
    for test in {test for fault in ALL for test in fault.near}:
        path, *classes_and_name = test.split("::")
        name = classes_and_name[-1] if classes_and_name else ""
        assert Path(path).name.startswith("test_"), test
        assert not name or f"def {name}(" in text_of(path), f"{path} has no {name}"
        assert (ROOT / path).is_file(), test
