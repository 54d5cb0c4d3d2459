"""Fixtures of all scenarios."""

import pytest

from gpuyard.control import user_requests


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make an array of four a large request, which is processed in several chunks."""
    monkeypatch.setattr(user_requests, "_PIECE", 3)
    monkeypatch.setattr(user_requests, "_SMALL", 3)
