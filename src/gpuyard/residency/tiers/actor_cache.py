"""Actors for workers: a sequence of frames, uploaded once and shared by all, or streamed where there is no room."""

import contextlib
from collections.abc import Iterator, Sequence

from gpuyard.residency.loading.named_arrays import Arrays
from gpuyard.residency.memory.device_memory import TransferLane
from gpuyard.residency.memory.page_pool import PagePool
from gpuyard.residency.tiers.asset_copies import Copies
from gpuyard.residency.tiers.asset_loans import Loan
from gpuyard.residency.tiers.asset_tiers import Tiers
from gpuyard.residency.tiers.oom_fallback import climb
from gpuyard.residency.tiers.stream_frames import FrameStream, StreamedFrames

Frames = Sequence[Arrays]


class ActorCache:
    """All of a sequence is in VRAM, or nothing of it but the frames that a stream has in hand."""

    def __init__(self, tiers: Tiers, pool: PagePool) -> None:
        self._tiers, self._pool = tiers, pool

    @contextlib.contextmanager
    def hold(self, key: str | None, number: int, lane: TransferLane) -> Iterator[Frames]:
        """Its frames, for the work of that number; none for work without an actor."""
        if key is None:
            yield ()
            return
        loan = climb(self._tiers, lambda: self._tiers.take(key, number))
        try:
            with self._frames(loan, lane) as frames:
                yield frames
        finally:
            self._tiers.give_back(loan)

    @contextlib.contextmanager
    def _frames(self, loan: Loan, lane: TransferLane) -> Iterator[Frames]:
        copies = loan.copies
        if not loan.is_streamed:
            yield _resident(self._tiers, copies)
            return
        stream = climb(self._tiers, lambda: FrameStream(self._tiers, copies, self._pool, lane))
        try:
            yield StreamedFrames(stream)
        finally:
            stream.close()


def _resident(tiers: Tiers, copies: Copies) -> Frames:
    return tuple(Arrays(tiers.memory, copies.buffer, layout, copies.asset.path) for layout in copies.layouts)
