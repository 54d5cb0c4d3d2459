"""What all stories share."""

import pytest

from gpuyard.control import requests


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """An array of four is a large request, done in pieces."""
    monkeypatch.setattr(requests, "_PIECE", 3)
    monkeypatch.setattr(requests, "_SMALL", 3)
