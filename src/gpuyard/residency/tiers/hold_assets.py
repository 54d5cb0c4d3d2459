"""Hold the assets of a render unit in VRAM while a worker uses them: scenes, and actors as sequences of frames."""

import contextlib
from collections.abc import Iterator, Sequence

from gpuyard.residency.loading.named_arrays import Arrays
from gpuyard.residency.memory.device_memory import TransferLane
from gpuyard.residency.memory.page_pool import PagePool
from gpuyard.residency.tiers.asset_tiers import Tiers
from gpuyard.residency.tiers.asset_users import Loan
from gpuyard.residency.tiers.oom_fallback import retry_with_less
from gpuyard.residency.tiers.stream_frames import FrameStream, StreamedFrames

Frames = Sequence[Arrays]


class SceneManager:
    """A scene in VRAM is shared by all workers that render it; a worker that finds all slots in use waits for one.

    A scene that is no longer held stays until its slot is needed. Then it moves to RAM, or is dropped if no later unit
    needs it.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers

    @contextlib.contextmanager
    def hold(self, key: str | None, number: int) -> Iterator[Arrays | None]:
        """Yield the scene for the unit with that number; None for a unit without a scene."""
        if key is None:
            yield None
            return
        with _take(self._tiers, key, number) as loan:
            yield _arrays(self._tiers, loan)[0]


class ActorCache:
    """An actor is in VRAM as a whole, shared by all workers, or streamed: then only the frames of a stream are."""

    def __init__(self, tiers: Tiers, pool: PagePool) -> None:
        self._tiers, self._pool = tiers, pool

    @contextlib.contextmanager
    def hold(self, key: str | None, number: int, lane: TransferLane) -> Iterator[Frames]:
        """Yield the frames for the unit with that number; none for a unit without an actor."""
        if key is None:
            yield ()
            return
        with _take(self._tiers, key, number) as loan:
            if not loan.is_streamed:
                yield _arrays(self._tiers, loan)
                return
            stream = retry_with_less(self._tiers, lambda: FrameStream(self._tiers, loan.copies, self._pool, lane))
            with contextlib.closing(stream):
                yield StreamedFrames(stream)


@contextlib.contextmanager
def _take(tiers: Tiers, key: str, number: int) -> Iterator[Loan]:
    loan = retry_with_less(tiers, lambda: tiers.take(key, number))
    try:
        yield loan
    finally:
        tiers.give_back(loan)


def _arrays(tiers: Tiers, loan: Loan) -> tuple[Arrays, ...]:
    copies = loan.copies
    return tuple(Arrays(tiers.memory, copies.buffer, layout, copies.asset.path) for layout in copies.layouts)
