"""Requests to a queue without a scheduler."""

from types import SimpleNamespace
from typing import cast

from gpuyard.queue.step import Controller
from gpuyard.queue.transitions import JobTransitions
from gpuyard.queue.user_requests import UserRequests
from tests.fakes.clock import FakeClock
from tests.unit.store import QueueDb


def requests_of(queue_db: QueueDb, transitions: JobTransitions) -> UserRequests:
    controller = cast("Controller", SimpleNamespace(transitions=transitions))
    return UserRequests(controller, queue_db.store, queue_db.queries, FakeClock())
