"""Versions are ordered as installers do, and the order decides what a command does about a daemon."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from gpuyard.model.version_order import is_newer
from gpuyard.version import __version__

NUMBERS = st.integers(0, 20)
VERSIONS = st.builds(
    lambda release, stage, post, dev: ".".join(map(str, release)) + stage + post + dev,
    st.lists(NUMBERS, min_size=1, max_size=4),
    st.just("") | st.builds(lambda kind, number: f"{kind}{number}", st.sampled_from(["a", "b", "rc"]), NUMBERS),
    st.just("") | NUMBERS.map(lambda number: f".post{number}"),
    st.just("") | NUMBERS.map(lambda number: f".dev{number}"),
)


@given(VERSIONS, VERSIONS)
def test_versions_are_ordered_as_installers_order_them(one: str, other: str) -> None:
    assert is_newer(one, other) == (Version(one) > Version(other))


@pytest.mark.parametrize(
    ("newer", "older"),
    [
        ("0.10.0", "0.9.0"), ("0.2.0", "0.2.0rc1"), ("0.2.0rc1", "0.2.0b3"), ("0.2.0", "0.2.0.dev7"),
        ("1.0", "0.99.99"), ("0.2.0-beta.2", "0.2.0-alpha.9"),
    ],
)  # fmt: skip
def test_a_newer_version_is_newer_one_way_only(newer: str, older: str) -> None:
    assert is_newer(newer, older)
    assert not is_newer(older, newer)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("0.2", "0.2.0"), ("0.2.0+gpu", "0.2.0+cpu"), ("0.2.0", "banana"), ("banana", "0.2.0"), ("", "0.2.0"),
        ("9" * 101, "1"),
    ],
)  # fmt: skip
def test_versions_without_an_order_are_newer_in_neither_direction(one: str, other: str) -> None:
    assert not is_newer(one, other)
    assert not is_newer(other, one)


def test_every_version_can_be_put_in_order() -> None:
    assert is_newer("0.2.0", None), "every version is newer than a daemon that reports none"
    assert is_newer(f"{__version__}.post1", __version__), "our own version can be put in order"
