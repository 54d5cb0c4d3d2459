"""What a runner and its viewers say to each other arrives as it was said, however it was cut on the way."""

from hypothesis import given
from hypothesis import strategies as st

from gpuyard.engines.session import viewer

FRAMES = st.lists(st.tuples(st.sampled_from([viewer.OUTPUT, viewer.END, viewer.KEYS]), st.binary(max_size=20)))


@given(frames=FRAMES, size=st.integers(min_value=1, max_value=30))
def test_frames_are_whole_and_in_order_whatever_comes_at_once(frames: list[tuple[int, bytes]], size: int) -> None:
    content = b"".join(viewer.frame(kind, text) for kind, text in frames)
    unframed = viewer.Unframed()
    pieces = [content[at : at + size] for at in range(0, len(content), size)]
    assert [one for piece in pieces for one in unframed.take(piece)] == frames
