"""Command lines as one text, and changes of a command's arguments."""

import shlex
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuyard.errors import UserError
from gpuyard.model.command_line import change_arguments, is_change_of_arguments, read_line
from gpuyard.model.placeholders import fill_in, used_names
from gpuyard.model.submission import Submission, SubmissionRequest, parse_submission

COMMAND = ("python", "train.py", "--lr", "3e-4", "--seed=1", "--verbose", "data.csv", "model.width=64")


@example("a='")
@given(st.text(st.sampled_from("ab-=/.'\" \t\r\v\x1f\xa0é"), max_size=12))
def test_other_lines_are_split_like_those_of_a_shell(line: str) -> None:
    """A no-break space, for one, is part of an argument."""
    try:
        command = read_line(line)
    except UserError:
        with pytest.raises(ValueError, match="No closing quotation"):
            shlex.split(line)
    else:  # a shell says itself that a quote is open
        assert command == ("/bin/sh", "-c", line) or command == tuple(shlex.split(line))


def test_an_open_quote_is_an_error() -> None:
    with pytest.raises(UserError, match="No closing quotation"):
        read_line("python 'a.py")


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (["--lr", "1e-3"], (*COMMAND[:3], "1e-3", *COMMAND[4:])),
        (["--lr=1e-3"], (*COMMAND[:2], "--lr=1e-3", *COMMAND[4:])),
        (["--seed", "2"], (*COMMAND[:4], "--seed", "2", *COMMAND[5:])),
        (["--verbose"], COMMAND),
        (["model.width=128"], (*COMMAND[:-1], "model.width=128")),
        (["--new", "-5"], (*COMMAND, "--new", "-5")),
        (["--lr", "-1", "--new"], (*COMMAND[:3], "-1", *COMMAND[4:], "--new")),
    ],
)  # fmt: skip
def test_options_that_the_command_has_are_replaced_and_others_added(words: list[str], changed: tuple[str, ...]) -> None:
    assert change_arguments(COMMAND, words) == changed


@pytest.mark.parametrize(
    ("words", "is_change"),
    [
        (["--lr", "1"], True), (["-n", "1"], True), (["lr=1"], True), (["python", "b.py"], False), (["-5"], False),
        ([], False),
    ],
)  # fmt: skip
def test_words_that_begin_with_an_option_or_a_setting_name_no_program(words: list[str], is_change: bool) -> None:
    assert is_change_of_arguments(words) is is_change


def submit(*command: str, table: str | None = None, **options: Any) -> Submission:
    return parse_submission(SubmissionRequest(cwd="/", environment={}, command=command, table=table, options=options))


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("--lr={lr}", "--lr=3"), ("{{lr}}", "{lr}"), ("{{{lr}}}", "{3}"), ('{"lr":{lr}}', '{"lr":3}'),
        ('{"a": {"lr": 1}}', '{"a": {"lr": 1}}'), ("{print $1}", "{print $1}"), ("{{print}}", "{print}"),
        ("${lr} $lr {}", "${lr} $lr {}"), ("{other} {{{other}}}", "{other} {{{other}}}"),
    ],
)  # fmt: skip
def test_braces_that_are_no_placeholders_stay(text: str, filled: str) -> None:
    assert fill_in([text], {"lr": "3"}) == (filled,)


# How each part of a command is written, and what becomes of it with a=1 and b=2.
PARTS = st.sampled_from(
    [
        ("{a}", "1"), ("{{a}}", "{a}"), ("{{{b}}}", "{2}"), ("{{c}}", "{c}"), ("${a}", "${a}"), ("{}", "{}"),
        ("{ a }", "{ a }"),
    ]
)  # fmt: skip


@given(st.lists(PARTS | st.text(alphabet='ab$":, ', max_size=5).map(lambda text: (text, text)), max_size=8))
def test_any_text_can_be_written_with_doubled_braces(parts: list[tuple[str, str]]) -> None:
    written = "|".join(before for before, _ in parts)
    assert fill_in([written], {"a": "1", "b": "2"}) == ("|".join(after for _, after in parts),)
    assert set(used_names([written])) <= {"a", "b"}


@pytest.mark.parametrize(
    ("command", "options", "says", "hint"),
    [
        (["run", "{LR}"], {"sweep": "lr=1,2"}, "{LR} is not a placeholder of --sweep; did you mean {lr}?", "{{LR}}"),
        (["run", "{lr}", "{sed}"], {"sweep": ["lr=1", "seed=2"]}, "did you mean {seed}?", "{{sed}}"),
        (["awk", "{print}", "{x}"], {"sweep": "x=1,2"}, "{print} is not a placeholder: --sweep gives {x}", "{{print}}"),
        (["run"], {"sweep": "lr=1,2"}, "no placeholder uses the values of --sweep lr", "--env LR={lr}"),
        (["run", "{lr}"], {"sweep": ["lr=1,2", "seed=1"]}, "no placeholder uses the values of --sweep seed", "{seed}"),
        (["run", "${lr}"], {"sweep": "lr=1,2"}, "no placeholder uses", "{lr}"),
        (["run", "{lr}"], {"sweep": "lr=1,2", "env": ["A={Lr}"]}, "did you mean {lr}?", "{{Lr}}"),
        (["run", "{indx}"], {"array": "0-3"}, "{indx} is not a placeholder of --array; did you mean {index}?", ""),
        (["run", "{LR}"], {"table": "lr\n1\n"}, "{LR} is not a placeholder of the CSV file; did you mean {lr}?", ""),
        (["run"], {"table": "lr,LR\n1,2\n"}, "differ only in capitals", ""),
        (["run"], {"sample": 3}, "--sample goes with --sweep", "leave out"),
        (["run", "{lr}"], {"sweep": "lr=1,2", "seed": 3}, "--seed goes with --sample", "leave out"),
    ],
)
def test_a_mistake_names_the_nearest_name(command: list[str], options: dict[str, Any], says: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        submit(*command, **options)
    assert says in caught.value.message
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (["run", "{{LR}}", "{lr}", '{"a": {"b": 1}}', "{print $1}", "${HOME}"], {"sweep": "lr=1,2"}),
        (["run"], {"sweep": "lr=1,2", "env": ["LR={lr}"]}),
        (["sh", "-c", "echo $GPUYARD_SWEEP_LR"], {"sweep": "lr=1,2"}),
        (["run"], {"sweep": "lr=1,2", "output": "{lr}.txt"}),
        (["run", "{lr}"], {"table": "lr,note\n1,a\n2,b\n"}),
        (["run"], {"array": "0-3"}),
        (["run", "{LR}"], {}),
        (["run", "{LR}"], {"sweep": "lr=1,2", "concurrency": 2}),
    ],
)
def test_what_is_used_or_escaped_is_accepted(command: list[str], options: dict[str, Any]) -> None:
    submit(*command, **options)


def test_a_submission_knows_which_values_vary_and_which_variables_are_filled_in() -> None:
    spec = submit("run", "{a}", "{b}", sweep=["a=1,2", "b=3"], env=["A={a}", "B=3", "C={{a}}"]).spec
    assert (spec.varies, spec.filled_variables) == (("a",), ("A",))
    assert submit("run", table="a,b\n1,x\n1,y\n").spec.varies == ("b",)
    assert submit("run", array="0-3").spec.varies == ()


def test_a_sample_has_as_many_jobs_as_asked_for() -> None:
    huge = [f"{name}=0..999999" for name in "abc"]
    submission = submit("run", "{a}{b}{c}", sweep=huge, sample=7)
    assert (submission.count, len(list(submission.elements))) == (7, 7)
    assert submission.elements == submit("run", "{a}{b}{c}", sweep=huge, sample="7", seed="0").elements
    assert submission.elements != submit("run", "{a}{b}{c}", sweep=huge, sample=7, seed=1).elements
