"""Frames between a runner and its viewers arrive complete for any chunks in which their bytes are received."""

from hypothesis import given
from hypothesis import strategies as st

from gpuyard.engines.session import viewer

FRAMES = st.lists(st.tuples(st.sampled_from([viewer.OUTPUT, viewer.END, viewer.KEYS]), st.binary(max_size=20)))


@given(frames=FRAMES, size=st.integers(min_value=1, max_value=30))
def test_frames_are_whole_and_in_order_for_any_chunk_size(frames: list[tuple[int, bytes]], size: int) -> None:
    content = b"".join(viewer.frame(kind, text) for kind, text in frames)
    decoder = viewer.FrameDecoder()
    chunks = [content[at : at + size] for at in range(0, len(content), size)]
    assert [frame for chunk in chunks for frame in decoder.feed(chunk)] == frames
