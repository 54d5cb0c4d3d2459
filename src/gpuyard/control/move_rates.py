"""LearnedRates: how fast this machine suspends and resumes, kept in the queue's database.

A figure counts for one program only if no other was moved at the same time. The figures of programs that were moved out
side by side, from within 2 s of each other, count together, once the last of them is out.
"""

import msgspec

from gpuyard.core.memory.move_rates import MoveRates, learn_back, learn_out, learn_together
from gpuyard.store.job_store import JobStore

_SETTING = "move_rates"
_TOGETHER_S = 2.0


class LearnedRates:
    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._known: tuple[str | None, MoveRates] | None = None
        self._moving: set[tuple[int, bool]] = set()  # jobs, and whether they are being resumed
        self._was_shared = self._is_spoilt = False  # since the first of those that are moving began
        self._began_at = 0.0
        self._out_mb = 0.0  # by the driver, since then

    @property
    def rates(self) -> MoveRates:
        """The rates as they are stored, or the defaults; those of another version of gpuyard are forgotten."""
        text = self._store.setting(_SETTING)
        if self._known is None or self._known[0] != text:
            try:
                rates = MoveRates() if text is None else msgspec.json.decode(text, type=MoveRates)
            except msgspec.MsgspecError:
                rates = MoveRates()
            self._known = text, rates
        return self._known[1]

    def begin(self, job_id: int, now: float, *, is_resumed: bool) -> None:
        if not self._moving:
            self._began_at, self._out_mb, self._was_shared, self._is_spoilt = now, 0.0, False, False
        self._moving.add((job_id, is_resumed))
        self._was_shared = self._was_shared or len(self._moving) > 1
        self._is_spoilt = self._is_spoilt or is_resumed or now > self._began_at + _TOGETHER_S

    def fail(self, job_id: int, *, is_resumed: bool) -> None:
        """Note a move that failed: it says nothing about rates, nor do those beside it."""
        self._moving.discard((job_id, is_resumed))
        self._was_shared = self._is_spoilt = True

    def end(  # noqa: PLR0913 - what is known of a move
        self, job_id: int, memory_mb: float, seconds: float | None, now: float, *, is_resumed: bool, is_parked: bool
    ) -> None:
        """Learn from a move that is over. Call it in a transaction."""
        if (job_id, is_resumed) not in self._moving or seconds is None:
            return
        self._moving.discard((job_id, is_resumed))
        rates = self.rates
        if not self._was_shared:
            learn = learn_back if is_resumed else learn_out
            self._keep(learn(rates, memory_mb, seconds, is_parked=is_parked))
            return
        self._out_mb += memory_mb if not (is_resumed or is_parked) else 0.0
        if not (self._moving or self._is_spoilt):
            self._keep(learn_together(rates, self._out_mb, now - self._began_at))

    def _keep(self, rates: MoveRates) -> None:
        if rates != self.rates:
            self._store.set_setting(_SETTING, msgspec.json.encode(rates).decode())
