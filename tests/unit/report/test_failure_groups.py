from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.model.lifecycle import JobState
from gpuyard.report.failure_causes import (
    MOST_CAUSES,
    CauseTexts,
    cause_key,
    count_causes,
    count_jobs,
    default_since,
    merge_texts,
)


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
        ("exit status 1", "exit status 2"), ("signal 9 (SIGKILL)", "signal 11 (SIGSEGV)"),
        ("OSError: [Errno 2] x", "OSError: [Errno 28] x"), ("HTTP Error 404", "HTTP Error 503"),
        ("KeyError: 'lr'", "KeyError: 'epochs'"), ("No module named 'a'", "No module named 'b'"),
    ],
)  # fmt: skip
def test_numbers_and_words_that_name_an_error_tell_causes_apart(first: str, second: str) -> None:
    assert cause_key(first) != cause_key(second)


def test_groups_are_ordered_and_merged() -> None:
    nan, missing = "ValueError: loss is NaN", "ModuleNotFoundError: No module named 'x'"
    causes = count_causes([(7, missing), (9, nan), (3, nan), (4, "exit status 1")])
    assert [(cause.text, cause.ids, cause.count) for cause in causes] == [
        (nan, "3 9", 2), ("exit status 1", "4", 1), (missing, "7", 1),
    ]  # fmt: skip
    (cause,) = count_causes([(1, "step 1 of 5"), (2, "step 2 of 5"), (3, "step 2 of 6")])
    assert cause.text == "step … of …", "a text that was merged meets a third"
    # Further causes get no key once there are many.
    kept = CauseTexts(2)
    keys = [kept.key(text) for text in ("a 1", "b", "c", "a 2", None)]
    assert [kept.text(key) for key in keys] == ["a …", "b", None, "a …", None]


TEXTS = st.lists(
    st.sampled_from(["step ", "12", "3.5 GiB", "…", "0xff", "exit status 1", ": ", "tmpabcdef12"]), max_size=9
)


@given(TEXTS.map("".join) | st.text(max_size=400), TEXTS.map("".join))
def test_a_text_has_the_cause_of_its_own_key_and_of_each_merge(first: str, second: str) -> None:
    assert merge_texts(first, first) == first
    if cause_key(first) == cause_key(second):
        assert cause_key(merge_texts(first, second)) == cause_key(first)


@pytest.mark.parametrize(
    ("now", "since"),
    [
        ("2026-11-18 09:00", "2026-11-17 18:00"), ("2026-11-18 17:59", "2026-11-17 18:00"),
        ("2026-11-18 23:00", "2026-11-17 18:00"), ("2026-11-19 00:00", "2026-11-18 18:00"),
        ("2026-11-19 00:01", "2026-11-18 18:00"),
    ],
)  # fmt: skip
def test_a_summary_begins_at_the_last_evening_that_is_six_hours_ago(now: str, since: str) -> None:
    assert default_since(datetime.fromisoformat(now)) == datetime.fromisoformat(since)


def test_jobs_of_rare_causes_are_counted_together() -> None:
    names = [chr(97 + at // 26) + chr(97 + at % 26) for at in range(MOST_CAUSES + 3)]
    *causes, rest = count_causes((at + 1, f"KeyError: '{name}'") for at, name in enumerate(names))
    assert len(causes) == MOST_CAUSES
    assert (rest.text, rest.count, rest.ids) == (None, 3, f"{MOST_CAUSES + 1}-{MOST_CAUSES + 3}")


def test_jobs_that_start_by_themselves_wait_and_others_are_counted_apart() -> None:
    counts = dict.fromkeys(JobState, 1)
    now = count_jobs(counts)
    assert (now.running, now.waiting, now.held, now.suspended) == (4, 4, 1, 1)
    assert count_jobs({}).running == 0
