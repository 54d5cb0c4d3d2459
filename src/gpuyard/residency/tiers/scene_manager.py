"""Scenes for workers: at most so many in VRAM, each shared by all who render it."""

import contextlib
from collections.abc import Iterator

from gpuyard.residency.loading.named_arrays import Arrays
from gpuyard.residency.tiers.asset_tiers import Tiers
from gpuyard.residency.tiers.oom_fallback import climb


class SceneManager:
    """A scene is used again where it is in VRAM, else promoted; whoever finds all slots in use waits for one.

    A scene that nobody holds stays until its slot is needed: then it goes to RAM, or away where nobody needs it again.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers

    @contextlib.contextmanager
    def hold(self, key: str | None, number: int) -> Iterator[Arrays | None]:
        """The scene, for the work of that number; nothing for work without one."""
        if key is None:
            yield None
            return
        loan = climb(self._tiers, lambda: self._tiers.take(key, number))
        try:
            copies = loan.copies
            yield Arrays(self._tiers.memory, copies.buffer, copies.layouts[0], copies.asset.path)
        finally:
            self._tiers.give_back(loan)
