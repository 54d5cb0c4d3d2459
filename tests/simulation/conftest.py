"""Fixtures of all scenarios."""

import pytest

from gpuyard.control import add_submission, user_requests


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make an array of four a large request, which is processed in several chunks."""
    for module in (add_submission, user_requests):
        monkeypatch.setattr(module, "PIECE", 3)
    monkeypatch.setattr(add_submission, "_SMALL", 3)
