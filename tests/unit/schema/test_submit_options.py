"""The table of submit options: everything generated from it agrees with it."""

import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, get_type_hints

import pytest

from gpuyard.model.job_spec import DEFAULT_GRACE_S, DEFAULT_LOG_CAP_MB, BatchPace, OnPreempt, OnReboot
from gpuyard.model.machine_snapshot import Vendor
from gpuyard.model.option import Option
from gpuyard.model.option_values import Options
from gpuyard.model.submit_options import SUBMIT_OPTIONS
from gpuyard.schema import requests
from gpuyard.schema.requests import SubmitKwargs
from gpuyard.ui.cli.jobs.submit import VERB

TYPES: dict[str, Any] = {
    "flag": bool, "whole": requests.Whole, "number": requests.Number, "size": requests.Size,
    "time": requests.Time, "text": str, "word": str, "texts": requests.Texts, "ids": requests.JobIds,
}  # fmt: skip


def expected_type(option: Option) -> Any:
    return (Literal[option.choices] if option.kind == "choice" else TYPES[option.kind]) | None


def test_clients_have_every_option() -> None:
    expected = {name.replace("-", "_"): expected_type(option) for name, option in SUBMIT_OPTIONS.items()}
    assert get_type_hints(SubmitKwargs) == expected, "client submit accepts every option with its type"
    # The command line has every option except those of batches.
    sent = {option.name for option in VERB.options if option.name in SUBMIT_OPTIONS}
    assert sent == {name for name, option in SUBMIT_OPTIONS.items() if not option.is_for_batch}


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("gpus", 1), ("retries", 0), ("grace", DEFAULT_GRACE_S), ("log-cap", DEFAULT_LOG_CAP_MB),
        ("smoothing", BatchPace().smoothing_s), ("steady", BatchPace().steady_s), ("stagger", 0.0),
        ("on-preempt", OnPreempt.SUSPEND), ("vram", None), ("exclusive", False), ("env", []),
    ],
)  # fmt: skip
def test_defaults_are_those_of_a_job(name: str, default: object) -> None:
    assert Options({}, SUBMIT_OPTIONS)[name] == default


@pytest.mark.parametrize(("name", "kind"), [("vendor", Vendor), ("on-preempt", OnPreempt), ("on-reboot", OnReboot)])
def test_choices_are_the_members_of_their_enumeration(name: str, kind: Any) -> None:
    assert SUBMIT_OPTIONS[name].choices == tuple(kind)


def test_the_form_of_the_web_page_is_generated_from_the_table() -> None:
    done = subprocess.run([sys.executable, "scripts/submit-options"], capture_output=True, text=True, check=True)
    written = Path("src/gpuyard/ui/web/submit_options.js").read_text(encoding="utf-8")
    assert written == done.stdout, "run scripts/submit-options --write"


def test_importing_the_table_imports_nothing_slow() -> None:
    slow = {"click", "enum", "json", "msgspec", "re", "typing"}
    code = f"import sys, gpuyard.model.submit_options; print(sorted(set(sys.modules) & {slow}))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", f"import sys; sys.path = {sys.path!r}; {code}"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert done.stdout == "[]\n"
