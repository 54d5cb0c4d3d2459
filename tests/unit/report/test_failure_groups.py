import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.report.failure_causes import CauseTexts, cause_key, count_causes, merge_texts


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        ("loss is NaN at step 120", "loss is NaN at step 340", "loss is NaN at step …"),
        ("bad lr=-1e-4, seed 3", "bad lr=0.003, seed 3", "bad lr=…, seed 3"),
        ("Tried to allocate 2.50 GiB", "Tried to allocate 512.00 MiB", "Tried to allocate …"),
        ("illegal access at 0x7f3ab2c0", "illegal access at 0x7f3ab2c8", "illegal access at …"),
        ("/tmp/tmpab12cd34/x is gone", "/tmp/tmpzz_2cd3k/x is gone", "/tmp/…/x is gone"),
        ("run12/model.pt is missing", "run9/model.pt is missing", "run…/model.pt is missing"),
        ("a.sh: line 3: 4711 Killed", "a.sh: line 3: 4712 Killed", "a.sh: line 3: … Killed"),
        ("commit 3f2a9c1d not found", "commit 9b1f00ee not found", "commit … not found"),
    ],
)
def test_texts_that_differ_only_in_figures_are_one_cause(first: str, second: str, together: str) -> None:
    assert cause_key(first) == cause_key(second)
    assert merge_texts(first, second) == together


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("exit status 1", "exit status 2"),
        ("signal 9 (SIGKILL)", "signal 11 (SIGSEGV)"),
        ("OSError: [Errno 2] x", "OSError: [Errno 28] x"),
        ("HTTP Error 404", "HTTP Error 503"),
        ("KeyError: 'lr'", "KeyError: 'epochs'"),
        ("No module named 'a'", "No module named 'b'"),
    ],
)
def test_numbers_and_words_that_name_an_error_tell_causes_apart(first: str, second: str) -> None:
    assert cause_key(first) != cause_key(second)


def test_the_largest_group_comes_first_with_its_jobs_in_order() -> None:
    nan, missing = "ValueError: loss is NaN", "ModuleNotFoundError: No module named 'x'"
    causes = count_causes([(7, missing), (9, nan), (3, nan), (4, "exit status 1")])
    assert [(cause.text, cause.ids, cause.count) for cause in causes] == [
        (nan, "3 9", 2), ("exit status 1", "4", 1), (missing, "7", 1),
    ]  # fmt: skip


def test_a_text_that_was_merged_meets_a_third() -> None:
    (cause,) = count_causes([(1, "step 1 of 5"), (2, "step 2 of 5"), (3, "step 2 of 6")])
    assert cause.text == "step … of …"


def test_further_causes_get_no_key_once_there_are_many() -> None:
    causes = CauseTexts(2)
    keys = [causes.key(text) for text in ("a 1", "b", "c", "a 2", None)]
    assert [causes.text(key) for key in keys] == ["a …", "b", None, "a …", None]


TEXTS = st.lists(
    st.sampled_from(["step ", "12", "3.5 GiB", "…", "0xff", "exit status 1", ": ", "tmpabcdef12"]), max_size=9
)


@given(TEXTS.map("".join) | st.text(max_size=400), TEXTS.map("".join))
def test_a_text_has_the_cause_of_its_own_key_and_of_each_merge(first: str, second: str) -> None:
    assert merge_texts(first, first) == first
    if cause_key(first) == cause_key(second):
        assert cause_key(merge_texts(first, second)) == cause_key(first)
