"""Read small kernel files, which may be missing or unreadable, or belong to a device that does not answer."""

from pathlib import Path


def read_text(path: Path) -> str | None:
    """Return the stripped text of the file, or None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except (OSError, ValueError):
        return None
