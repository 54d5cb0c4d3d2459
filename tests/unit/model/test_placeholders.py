"""Placeholders of commands: filled in, escaped, and checked against the values of a sweep, a table or an array."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.errors import UserError
from gpuyard.model.placeholders import fill_in, used_names
from gpuyard.model.submission import Submission, SubmissionRequest, parse_submission


def submit(*command: str, table: str | None = None, **options: Any) -> Submission:
    return parse_submission(SubmissionRequest(cwd="/", environment={}, command=command, table=table, options=options))


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("--lr={lr}", "--lr=3"),
        ("{{lr}}", "{lr}"),
        ("{{{lr}}}", "{3}"),
        ('{"lr":{lr}}', '{"lr":3}'),
        ('{"a": {"lr": 1}}', '{"a": {"lr": 1}}'),
        ("{print $1}", "{print $1}"),
        ("{{print}}", "{print}"),
        ("${lr} $lr {}", "${lr} $lr {}"),
        ("{other} {{{other}}}", "{other} {{{other}}}"),
    ],
)
def test_braces_that_are_no_placeholders_stay(text: str, filled: str) -> None:
    assert fill_in([text], {"lr": "3"}) == (filled,)


# How each part of a command is written, and what becomes of it with a=1 and b=2.
PARTS = st.sampled_from(
    [
        ("{a}", "1"),
        ("{{a}}", "{a}"),
        ("{{{b}}}", "{2}"),
        ("{{c}}", "{c}"),
        ("${a}", "${a}"),
        ("{}", "{}"),
        ("{ a }", "{ a }"),
    ]
)


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
def test_a_mistake_is_refused_with_the_nearest_name(
    command: list[str], options: dict[str, Any], says: str, hint: str
) -> None:
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
