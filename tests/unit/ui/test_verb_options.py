"""The options of a queue verb: the fast parser and click give the same result."""

import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.ui.cli import QUEUE_VERBS, import_verb
from gpuyard.ui.cli.click_group import click_command
from gpuyard.ui.cli.verb_options import ONE, Arguments, Option, Typed, Verb, parse

TABLE = (
    Option("flag", None, "A flag.", short="f"),
    Option("lines", "N", "A value.", short="n"),
    Option("env", "NAME=VALUE", "Many values.", is_repeatable=True),
    Option("two-words", "X", "A value."),
)
MANY = Verb("Many words.", TABLE, Arguments("IDS...", is_many=True))
PROGRAM = Verb("A program.", TABLE, Arguments("-- CMD...", is_program=True))
CHOICE = Verb("One of them.", TABLE, Arguments("start|stop", choices=("start", "stop")))
SINGLE = Verb("One word.", TABLE, ONE)
NONE = Verb("No word.", TABLE)
# Modules of gpuyard that a command imports before it sends its request.
TO_CONNECT = {
    "connect.fast_http", "connect.fast_json", "connect.paths", "errors", "system.file_systems", "system.private_files",
    "system.user_directories", "system.user_sockets", "ui.cli.verb_options", "version",
}  # fmt: skip
TO_SUBMIT = {"connect.git_folder", "connect.submitted_code", "system.submitting_shell", "ui.cli.jobs.submit"}


def read(verb: Verb, *arguments: str) -> tuple[dict[str, str | bool | list[str]], list[str]] | None:
    typed = parse(verb, list(arguments))
    return None if typed is None else (typed.options, typed.arguments)


def read_with_click(verb: Verb, arguments: list[str]) -> tuple[dict[str, str | bool | list[str]], list[str]] | None:
    parsed: list[Typed] = []

    def run(typed: Typed) -> int:
        parsed.append(typed)
        return 0

    try:
        click_command("verb", verb, run).main(arguments, standalone_mode=False)
    except click.ClickException:
        return None
    return (parsed[0].options, parsed[0].arguments) if parsed else None


def test_values_flags_and_arguments_may_come_in_any_order() -> None:
    assert read(MANY, "17", "--lines", "5", "-f", "18", "--two-words=a=b") == (
        {"lines": "5", "flag": True, "two-words": "a=b"},
        ["17", "18"],
    )


def test_a_repeatable_option_collects_its_values_and_any_other_takes_the_last() -> None:
    assert read(MANY, "--env", "A=1", "--env=B=2", "-n", "1", "-n", "2") == ({"env": ["A=1", "B=2"], "lines": "2"}, [])


def test_two_dashes_end_the_options() -> None:
    assert read(MANY, "--flag", "--", "--lines", "-f") == ({"flag": True}, ["--lines", "-f"])


def test_all_arguments_after_a_program_belong_to_the_program() -> None:
    assert read(PROGRAM, "-f", "python", "--lines", "3", "--", "-x") == (
        {"flag": True},
        ["python", "--lines", "3", "--", "-x"],
    )
    assert read(PROGRAM, "--lines", "3", "--", "-x", "--", "y") == ({"lines": "3"}, ["-x", "--", "y"])


def test_a_negative_number_is_an_argument_but_not_a_program() -> None:
    assert read(MANY, "17", "-5") == ({}, ["17", "-5"])
    assert read(PROGRAM, "-5") is None


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        (MANY, ["--help"]),
        (MANY, ["-h"]),
        (MANY, ["--unknown"]),
        (MANY, ["--lines"]),
        (MANY, ["--flag=yes"]),
        (MANY, ["-n5"]),
        (MANY, ["-fn", "5"]),
        (MANY, ["--line", "5"]),
        (CHOICE, []),
        (CHOICE, ["restart"]),
        (CHOICE, ["start", "stop"]),
        (SINGLE, []),
        (SINGLE, ["1", "2"]),
        (NONE, ["1"]),
    ],
)
def test_ambiguous_arguments_are_left_to_click(verb: Verb, arguments: list[str]) -> None:
    assert read(verb, *arguments) is None


def test_click_parses_what_the_fast_parser_leaves_to_it() -> None:
    assert read_with_click(MANY, ["-fn5", "17"]) == ({"flag": True, "lines": "5"}, ["17"])
    assert read_with_click(CHOICE, ["restart"]) is None


WORDS = st.sampled_from(
    ["--flag", "-f", "--lines", "-n", "--lines=", "--lines=3", "--env", "--env=A=1", "--two-words", "--flag=1", "--",
     "-", "", "17", "start", "stop", "a b", "é", "--help", "--unknown", "-x", "-fn"]
)  # fmt: skip


@given(verb=st.sampled_from([MANY, PROGRAM, CHOICE, SINGLE, NONE]), arguments=st.lists(WORDS, max_size=7))
def test_the_fast_parser_gives_the_same_result_as_click(verb: Verb, arguments: list[str]) -> None:
    fast = read(verb, *arguments)
    if fast is not None:
        assert fast == read_with_click(verb, arguments)


@pytest.mark.parametrize("verb", sorted(QUEUE_VERBS))
def test_the_help_of_every_queue_verb_starts_with_its_line_in_the_overview(verb: str) -> None:
    module = import_verb(verb)
    command = click_command(verb, module.VERB, module.run)
    output = command.get_help(click.Context(command, info_name=verb))
    first_words = QUEUE_VERBS[verb].replace(".", "").split()[:2]
    assert " ".join(first_words) in output
    assert "--help" in output


@pytest.mark.parametrize("verb", sorted(QUEUE_VERBS))
@pytest.mark.usefixtures("unmeasured")
def test_a_queue_verb_is_imported_without_slow_modules(verb: str) -> None:
    heavy = {"click", "rich", "msgspec", "psutil", "asyncio", "socket", "subprocess", "json"}
    program = (
        "import sys, gpuyard.ui.cli.verb_options\n"
        f"gpuyard.ui.cli.import_verb('{verb}')\n"
        f"print(sorted({heavy!r} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=True)
    assert result.stdout == "[]\n"


@pytest.mark.parametrize(
    ("typed", "allowed"),
    [(["submit", "--", "python", "train.py"], TO_CONNECT | TO_SUBMIT), (["queue"], TO_CONNECT | {"ui.cli.jobs.queue"})],
)
@pytest.mark.usefixtures("unmeasured")
def test_a_request_is_sent_before_further_modules_are_imported(
    typed: list[str], allowed: set[str], own_home: Path
) -> None:
    """Whatever prints the answer is imported while the daemon works (`meanwhile`)."""
    program = (
        "import os, sys\n"
        "from gpuyard.connect import fast_http\n"
        "from gpuyard.ui.cli import main\n"
        "def show(exchange, message):\n"
        "    late = ('_json', 'resource', 'gpuyard.')\n"
        "    print(*(name for name in sys.modules if name.startswith(late)), flush=True)\n"
        "    os._exit(0)\n"
        "fast_http.Exchange.send = show\n"
        "main()"
    )
    own_home.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(own_home / "daemon.sock"))
        listening.listen()
        argv = [sys.executable, "-c", program, *typed]
        result = subprocess.run(argv, capture_output=True, text=True, timeout=90, check=True)
    packages = {"connect", "system", "ui", "ui.cli", "ui.cli.jobs"}
    found = {name.removeprefix("gpuyard.") for name in result.stdout.split()}
    assert found - packages == allowed


def test_the_help_of_submit_has_twelve_common_options_first_and_each_other_one_under_a_heading() -> None:
    verb = import_verb("submit")
    headings = {heading: names.split() for heading, names in verb.VERB.headings.items()}
    assert next(iter(headings)) == "Common options"
    assert len(headings["Common options"]) == 12
    listed = [name for names in headings.values() for name in names]
    assert sorted(listed) == sorted(option.name for option in verb.VERB.options)
    command = click_command("submit", verb.VERB, verb.run)
    lines = command.get_help(click.Context(command)).splitlines()
    found = [line.rstrip(":") for line in lines if line and not line.startswith((" ", "Usage"))]
    assert found == [*headings, "Other options"]
