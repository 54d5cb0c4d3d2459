"""The summary of a render as lines for people."""

from collections import Counter
from collections.abc import Iterator

from gpuyard.core.units import format_bytes, format_count, format_duration
from gpuyard.recipes.render.manifest import ManifestMistake
from gpuyard.residency.running.status_file import CountsStatus, RenderReport, RenderStatus, TierStatus
from gpuyard.ui.cli.text_table import clean, lay_out_facts

_MOST_SHOWN = 5
_KINDS = {
    "asset": "a scene or an actor cannot be read",
    "out-of-memory": "out of memory on the device, even alone",
    "too-large": "an asset is larger than the budget",
    "renderer": "the renderer failed",
    "output": "the output cannot be written",
}
_STALLS = {
    "disk": "for the disk",
    "upload": "for uploads",
    "slot": "for a scene slot (--scene-slots)",
    "vram": "for free VRAM (--vram-budget)",
    "ram": "for free RAM (--ram-budget)",
}


def summary_lines(report: RenderReport, bad: tuple[ManifestMistake, ...], out: str) -> Iterator[str]:
    yield _verdict(report.status)
    yield ""
    yield from lay_out_facts(_facts(report, bad, out))


def _verdict(status: RenderStatus) -> str:
    parts = [f"{status.rendered:,} of {status.labels:,} labels rendered"]
    parts += [f"{status.already:,} existed already"] if status.already else []
    parts += [f"{status.skipped:,} skipped"] if status.skipped else []
    left = status.labels - status.rendered - status.already - status.skipped
    parts += [f"{left:,} left"] if left else []
    return f"{', '.join(parts)}, in {format_duration(status.elapsed_s)}"


def _facts(report: RenderReport, bad: tuple[ManifestMistake, ...], out: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each heading with its lines."""
    status = report.status
    if bad:
        yield "manifest", [f"{format_count(len(bad), 'error')}; entries with errors were left out"]
    yield from _skips(report, out)
    if status.rendered:
        yield "moved", [_moved(status)]
        yield "assets", [_found(status.counts)]
        peak = max(status.vram.peak_assets, status.vram.peak_allocator or 0)
        yield "peak", [f"VRAM {_of(peak, status.vram)}, RAM {_of(status.ram.peak_assets, status.ram)}"]
    if status.counts.out_of_memory:
        yield "VRAM full", [f"{format_count(status.counts.out_of_memory, 'time')}; assets were dropped from VRAM"]
    stalls = sorted(((seconds, cause) for cause, seconds in status.stalls_s.items() if seconds >= 1), reverse=True)
    if stalls:
        yield "waited", [f"{format_duration(seconds)} {_STALLS.get(cause, cause)}" for seconds, cause in stalls]
    yield "files", [clean(out)]


def _skips(report: RenderReport, out: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each kind of skip with its first labels, the most frequent kind first."""
    for kind, number in Counter(skip.kind for skip in report.skipped).most_common():
        some = [skip for skip in report.skipped if skip.kind == kind][:_MOST_SHOWN]
        lines = [f"{number:,}: {_KINDS.get(kind, kind)}"]
        lines += [f"  {clean(skip.label)}: {clean(skip.reason)}" for skip in some]
        lines += (
            [f"  and {number - _MOST_SHOWN:,} more: see {clean(out)}/skipped.jsonl"] if number > _MOST_SHOWN else []
        )
        yield "skipped", lines


def _moved(status: RenderStatus) -> str:
    moved = status.moved
    amounts = {
        "read": moved.read_from_disk,
        "uploaded": moved.uploaded,
        "streamed": moved.streamed,
        "brought back to RAM": moved.downloaded,
    }
    return ", ".join(f"{format_bytes(nbytes)} {verb}" for verb, nbytes in amounts.items() if nbytes) or "nothing"


def _found(counts: CountsStatus) -> str:
    streams = f"; {counts.streams:,} streamed" if counts.streams else ""
    return f"{counts.vram_hits:,} found in VRAM, {counts.ram_hits:,} in RAM, {counts.misses:,} on disk{streams}"


def _of(nbytes: int, tier: TierStatus) -> str:
    return f"{format_bytes(nbytes)} of {format_bytes(tier.budget)}"
