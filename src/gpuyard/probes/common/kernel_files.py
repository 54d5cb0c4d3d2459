"""Small files of the kernel's, which may be missing, forbidden, or belong to a device that does not answer."""

from pathlib import Path


def read_text(path: Path) -> str | None:
    """What the file says without the space around it, or `None` where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except (OSError, ValueError):
        return None
