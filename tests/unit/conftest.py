"""Shared by unit tests: a queue database in memory."""

from collections.abc import Iterator

import pytest

from tests.unit.store import QueueDb


@pytest.fixture
def queue_db() -> Iterator[QueueDb]:
    made = QueueDb()
    yield made
    made.db.close()
