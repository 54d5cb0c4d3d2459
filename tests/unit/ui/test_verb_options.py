"""The grammar of the command line: what the one parser accepts, and the help that is made from the same tables."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpuyard.errors import UserError
from gpuyard.model.option import Option
from gpuyard.ui.cli import say_help
from gpuyard.ui.cli.command_grammar import Arguments, Command, Typed, Verb, parse, run_verb
from gpuyard.ui.cli.help_and_overview import verb_help
from gpuyard.ui.cli.verbs import JOB_VERBS, SERVICE_VERBS, VERBS, import_verb

TABLE = (
    Option("flag", "flag", None, "A flag.", short="f"), Option("lines", "text", "N", "A value.", short="n"),
    Option("env", "texts", "NAME=VALUE", "Many values."), Option("two-words", "text", "X", "A value."),
    Option("seconds", "time", "TIME", "A time.", default="2s", least=0.1),
)  # fmt: skip
MANY = Verb("Many words.", TABLE, Arguments("IDS...", is_many=True))
PROGRAM = Verb("A program.", TABLE, Arguments("-- CMD...", is_program=True))
DATA = Verb("Data.", TABLE, Arguments("WORDS", is_many=True, is_data=True))
CHOICE = Verb("One of them.", TABLE, Arguments("start|stop", choices=("start", "stop")))
SINGLE = Verb("One word.", TABLE, Arguments("ID"))
NONE = Verb("No word.", TABLE)
BELOW = Verb("Some below.", TABLE[:1], commands={"one": Command(SINGLE, lambda _: 1)})
HEAVY = {"rich", "msgspec", "psutil", "asyncio", "socket", "subprocess", "json"}
# Modules of gpuyard that a command imports before it sends its request.
TO_CONNECT = {
    "gpuyard.client.fast_http", "gpuyard.client.paths", "gpuyard.model.option", "gpuyard.errors",
    "gpuyard.system.user_directories", "gpuyard.system.private_files", "gpuyard.system.user_sockets",
    "gpuyard.ui.cli.command_grammar", "gpuyard.ui.cli.verbs", "gpuyard.version",
}  # fmt: skip
TO_SUBMIT = {"gpuyard.client.submitted_code", "gpuyard.system.submitting_shell", "gpuyard.ui.cli.jobs.submit"}


def read(verb: Verb, *arguments: str) -> tuple[dict[str, str | bool | list[str]], list[str]]:
    """Return the options and the arguments that the verb runs with."""
    found: list[Typed] = []

    def run(typed: Typed) -> int:
        found.append(typed)
        return 0

    run_verb("verb", Command(verb, run), arguments)
    return found[0].options, found[0].arguments


def test_values_flags_and_arguments_may_come_in_any_order() -> None:
    assert read(MANY, "17", "--lines", "5", "-f", "18", "--two-words=a=b") == (
        {"lines": "5", "flag": True, "two-words": "a=b"},
        ["17", "18"],
    )
    assert read(MANY, "--env", "A=1", "--env=B=2", "-n", "1", "-n", "2") == ({"env": ["A=1", "B=2"], "lines": "2"}, [])
    assert read(MANY, "--flag", "--", "--lines", "-f") == ({"flag": True}, ["--lines", "-f"])
    assert read(MANY, "-fn5", "17") == ({"flag": True, "lines": "5"}, ["17"])
    assert read(MANY, "-n5", "-f") == ({"flag": True, "lines": "5"}, [])


def test_all_arguments_after_a_program_belong_to_the_program_and_data_takes_exact_options() -> None:
    assert read(PROGRAM, "-f", "python", "--lines", "3", "--", "-x") == (
        {"flag": True},
        ["python", "--lines", "3", "--", "-x"],
    )
    assert read(PROGRAM, "--lines", "3", "--", "-x", "--", "y") == ({"lines": "3"}, ["-x", "--", "y"])
    assert read(MANY, "17", "-5") == ({}, ["17", "-5"])
    with pytest.raises(UserError, match="has no option '-5'"):
        read(PROGRAM, "-5")
    assert read(DATA, "-a", "--lines=3", "-f", "-", "--lines", "--x") == (
        {"flag": True, "lines": "--x"},
        ["-a", "--lines=3", "-"],
    )


def test_a_command_below_a_verb_has_the_options_of_both() -> None:
    typed: list[Typed] = []
    below = Verb("Below.", TABLE[1:], Arguments("ID"))
    above = Verb("Above.", TABLE[:1], commands={"below": Command(below, lambda each: typed.append(each) or 4)})  # type: ignore[func-returns-value]
    assert run_verb("above", Command(above, lambda _: 0), ["-f", "below", "7", "-n", "3"]) == 4
    assert (typed[0].options, typed[0].arguments) == ({"flag": True, "lines": "3"}, ["7"])
    assert typed[0].values()["seconds"] == 2.0


@pytest.mark.parametrize(
    ("verb", "arguments", "text", "hint"),
    [
        (MANY, ["--unknown"], "has no option '--unknown'", "--help`"),
        (MANY, ["--line", "5"], "has no option '--line'", "did you mean `--lines`?"),
        (MANY, ["-x"], "has no option '-x'", ""),
        (MANY, ["--lines"], "--lines takes a value", "--lines N: A value."),
        (MANY, ["-n"], "-n takes a value", "-n N"),
        (MANY, ["--flag=yes"], "--flag takes no value", ""),
        (CHOICE, [], "needs start|stop", ""),
        (CHOICE, ["stat"], "cannot be followed by 'stat'", "it can be start, stop"),
        (CHOICE, ["start", "stop"], "unexpected extra argument 'stop'", ""),
        (SINGLE, [], "needs ID", "see `gpuyard verb --help`"),
        (SINGLE, ["1", "2"], "unexpected extra argument '2'", ""),
        (NONE, ["1"], "unexpected extra argument '1'", ""),
        (BELOW, ["on"], "has no command 'on'", "did you mean `one`?"),
        (BELOW, ["one"], "`gpuyard verb one` needs ID", ""),
    ],
)
def test_a_mistake_is_named_with_what_to_type(verb: Verb, arguments: list[str], text: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        read(verb, *arguments)
    assert text in str(caught.value)
    assert hint in (caught.value.hint or "")


def test_values_are_parsed_by_their_kind_with_their_bounds() -> None:
    assert parse("verb", NONE, ["--seconds", "1m"]).values()["seconds"] == 60.0
    with pytest.raises(UserError, match="--seconds is too short"):
        parse("verb", NONE, ["--seconds", "1ms"]).values()


def test_help_is_shown_whatever_else_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb("verb", Command(SINGLE, lambda _: 1), ["-f", "-h"], say_help) == 0
    assert capsys.readouterr().out.startswith("Usage: gpuyard verb [OPTIONS] ID\n\n  One word.\n\nOptions:\n")


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_the_help_of_every_verb_starts_with_its_line_in_the_overview(verb: str) -> None:
    output = verb_help(verb, import_verb(verb).VERB)
    assert output.split("\n\n")[1].split()[0] == VERBS[verb].split()[0] or verb == "simulate"
    assert "--help" in output


@pytest.mark.parametrize("verb", sorted({**JOB_VERBS, **SERVICE_VERBS}))
@pytest.mark.usefixtures("unmeasured")
def test_a_queue_verb_is_imported_without_slow_modules(verb: str) -> None:
    program = (
        "import sys, gpuyard.ui.cli.command_grammar\n"
        f"gpuyard.ui.cli.import_verb('{verb}')\n"
        f"print(sorted({HEAVY!r} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=True)
    assert result.stdout == "[]\n"


@pytest.mark.parametrize(
    ("typed", "allowed"),
    [
        (["submit", "--", "python", "train.py"], TO_CONNECT | TO_SUBMIT),
        (["queue"], TO_CONNECT | {"gpuyard.ui.cli.jobs.queue"}),
    ],
)
@pytest.mark.usefixtures("unmeasured")
def test_a_request_is_sent_before_modules_are_imported(typed: list[str], allowed: set[str], own_home: Path) -> None:
    """Whatever prints the answer is imported while the daemon works (`meanwhile`)."""
    program = (
        "import os, sys\n"
        "from gpuyard.client import fast_http\n"
        "from gpuyard.ui.cli import main\n"
        "def show(exchange, message):\n"
        "    late = ('_json', 'gpuyard.')\n"
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
    packages = {name for name in result.stdout.split() if any(each.startswith(f"{name}.") for each in allowed)}
    assert set(result.stdout.split()) - packages == allowed


def test_the_help_of_submit_has_twelve_common_options_first_and_each_other_one_under_a_heading() -> None:
    verb = import_verb("submit")
    headings: dict[str, list[str]] = {}
    for option in verb.VERB.options:
        headings.setdefault(option.heading, []).append(option.name)
    assert next(iter(headings)) == "Common options"
    assert len(headings["Common options"]) == 12
    listed = [name for names in headings.values() for name in names]
    assert sorted(listed) == sorted(option.name for option in verb.VERB.options)
    lines = verb_help("submit", verb.VERB).splitlines()
    found = [line.rstrip(":") for line in lines if line and not line.startswith((" ", "Usage"))]
    assert found == [*headings, "Other options"]
