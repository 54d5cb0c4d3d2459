"""Needs survive the JSON of tickets and of the queue's database."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.model.lease import FixedMemory, MemoryNeed, Need, PartOfDevice, UncertainMemory, UnknownMemory, WholeDevice

sizes = st.floats(0.0, 1e6)
memory_needs = st.one_of(
    st.builds(FixedMemory, sizes),
    st.builds(UncertainMemory, sizes, sizes, sizes),
    st.builds(PartOfDevice, st.floats(0.01, 1.0)),
    st.builds(WholeDevice, st.none() | sizes),
    st.just(UnknownMemory()),
)


@given(st.builds(Need, devices=st.integers(0, 8), memory=memory_needs))
def test_a_need_is_read_back_as_written(need: Need) -> None:
    assert msgspec.json.decode(msgspec.json.encode(need), type=Need) == need
    assert msgspec.convert(msgspec.to_builtins(need), Need) == need


@pytest.mark.parametrize(
    ("memory", "is_exclusive", "required_mb"),
    [
        (FixedMemory(8.0), False, 8.0),
        (UncertainMemory(8.0, 4.0, 3.0), False, 8.0),
        (PartOfDevice(0.5), False, None),
        (WholeDevice(), True, None),
        (WholeDevice(8.0), True, 8.0),
        (UnknownMemory(), True, None),
    ],
)
def test_each_kind_says_whether_it_is_exclusive_and_how_much_must_be_free(
    memory: MemoryNeed, is_exclusive: bool, required_mb: float | None
) -> None:
    need = Need(memory=memory)
    assert (need.is_exclusive, need.required_mb) == (is_exclusive, required_mb)
