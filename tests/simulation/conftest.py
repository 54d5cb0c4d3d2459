"""Fixtures of all scenarios."""

import pytest

from gpuyard.queue import add_submission, dependants, user_requests


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make an array of four a large request, which is processed in several chunks, and two dependants very many."""
    monkeypatch.setattr(add_submission, "PIECE", 3)
    monkeypatch.setattr(add_submission, "_SMALL", 3)
    monkeypatch.setattr(user_requests, "PIECE", 3)
    monkeypatch.setattr(dependants, "_AT_ONCE", 1)
