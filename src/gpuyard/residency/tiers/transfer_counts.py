"""Counts of transfers, hits and stalls in the tiers. Pure."""

import msgspec

from gpuyard.residency.planning.assets import StallCause


class TransferCounts(msgspec.Struct):
    """Sizes are in bytes; `stalls_s` is by cause."""

    read_from_disk: int = 0
    uploaded: int = 0
    streamed: int = 0
    downloaded: int = 0
    vram_hits: int = 0
    ram_hits: int = 0
    misses: int = 0
    streams: int = 0
    out_of_memory: int = 0
    peak_vram: int = 0
    peak_ram: int = 0
    stalls_s: dict[str, float] = {}

    def with_more(self, other: "TransferCounts") -> "TransferCounts":
        """Return the sums; for peaks, the maximum."""
        stalls = {cause: self.stalls_s.get(cause, 0.0) + other.stalls_s.get(cause, 0.0) for cause in StallCause}
        both = {name: getattr(self, name) + getattr(other, name) for name in _ADDED}
        peaks = {name: max(getattr(self, name), getattr(other, name)) for name in ("peak_vram", "peak_ram")}
        return TransferCounts(
            **both, **peaks, stalls_s={cause: seconds for cause, seconds in stalls.items() if seconds}
        )


_ADDED = [name for name in TransferCounts.__struct_fields__ if name != "stalls_s" and not name.startswith("peak_")]
