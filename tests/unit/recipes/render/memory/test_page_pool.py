"""Pages of RAM: their content is read back unchanged, and released pages are reused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.recipes.render.memory.device_memory import LARGEST, SMALLEST, PagePool, Pages, page_size

SIZE = 16


def pool_of(made: list[int]) -> PagePool:
    def make(nbytes: int) -> memoryview:
        made.append(nbytes)
        return memoryview(bytearray(nbytes))

    return PagePool(make, SIZE)


@given(st.binary(min_size=1, max_size=200), st.data())
def test_any_range_of_bytes_is_read_completely_and_in_order(content: bytes, data: st.DataObject) -> None:
    pages = pool_of([]).take(len(content))
    written = 0
    for view in pages.views(0, len(content)):
        view[:] = content[written : written + view.nbytes]
        written += view.nbytes
    assert written == len(content)
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, len(content)))
    assert b"".join(pages.views(start, end - start)) == content[start:end]


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 4), (0, 41), (41, 0), (30, 11), (4, -1)])
def test_bytes_outside_of_a_blob_cannot_be_read(offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="of 40"):
        pool_of([]).take(40).views(offset, nbytes)


def test_released_pages_are_reused_before_new_pages_are_allocated() -> None:
    made: list[int] = []
    pool = pool_of(made)

    def used(nbytes: int) -> Pages:
        blob = pool.take(nbytes)
        blob.views(0, nbytes)
        return blob

    pool.give_back(used(3 * SIZE))
    again = [used(SIZE), used(SIZE + 1)]
    assert made == [SIZE] * 3
    more = used(2 * SIZE)
    assert made == [SIZE] * 5
    for each in (*again, more):
        pool.give_back(each)
    used(5 * SIZE)
    assert made == [SIZE] * 5


def test_a_blob_takes_whole_pages_of_its_own_when_they_are_first_used() -> None:
    pool = pool_of([])
    assert [pool.rounded(nbytes) for nbytes in (1, SIZE, SIZE + 1)] == [SIZE, SIZE, 2 * SIZE]
    pool = pool_of([])
    first, second = pool.take(20), pool.take(20)
    for blob, byte in ((first, 1), (second, 2)):
        for view in blob.views(0, 20):
            view[:] = bytes([byte]) * view.nbytes
    assert {*b"".join(first.views(0, 20))} == {1}
    made: list[int] = []
    blob = pool_of(made).take(4 * SIZE)
    blob.views(SIZE, SIZE + 1)
    assert made == [SIZE] * 2
    blob.views(0, 3 * SIZE)
    assert made == [SIZE] * 3


@pytest.mark.parametrize("ram", [1, 1 << 20, 1 << 30, 90 << 30, 1 << 40])
def test_the_page_size_is_a_small_part_of_the_budget_within_bounds(ram: int) -> None:
    size = page_size(ram)
    assert SMALLEST <= size <= LARGEST
    assert size == SMALLEST or size <= ram // 4096
    assert size == LARGEST or 2 * size > ram // 4096
