"""What unit tests share: a queue in memory."""

from collections.abc import Iterator

import pytest

from tests.unit.store import Shelf


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    made = Shelf()
    yield made
    made.db.close()
