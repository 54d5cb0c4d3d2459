import re

import pytest

from gpuyard.model.lazy_pattern import LazyPattern


def test_a_lazy_pattern_finds_what_the_pattern_finds() -> None:
    pattern = LazyPattern(r"a(\d)", re.IGNORECASE)
    assert [match[1] for match in pattern.finditer("A1 a2")] == ["1", "2"]
    assert pattern.search("A1 a2", 1, 4) is None
    assert pattern.match("xa1") is None
    assert pattern.fullmatch("A1") is not None
    assert pattern.sub("-", "A1 a2") == "- -"


def test_a_lazy_pattern_is_compiled_when_it_is_first_used() -> None:
    pattern = LazyPattern("(")
    with pytest.raises(re.error):
        pattern.search("")
