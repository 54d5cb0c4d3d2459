"""What all stories share."""

import pytest

from gpuyard.control import user_requests


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """An array of four is a large request, done in pieces."""
    monkeypatch.setattr(user_requests, "_PIECE", 3)
    monkeypatch.setattr(user_requests, "_SMALL", 3)
