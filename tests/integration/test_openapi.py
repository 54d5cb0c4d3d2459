"""The daemon answers every generated request as its OpenAPI document says, and never with an internal error.

EXAMPLES=500 in the environment tries more requests than CI has time for (default: 8 per operation).
"""

import asyncio
import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gpuyard.daemon.api.routes import Routes
from gpuyard.daemon.loop import SchedulerLoop as Loop
from gpuyard.engines.local.engine import LocalEngine
from gpuyard.engines.suspend.suspender import LocalSuspender
from gpuyard.ledger.ledger import QueueLedger, open_ledger
from gpuyard.model.submit_options import COMMAND_LINE_OPTIONS
from gpuyard.schema.operations import EVENTS, OPERATIONS, describe, document
from gpuyard.store.database import open_database
from gpuyard.system.clock import SystemClock
from gpuyard.system.processes import this_process
from tests.integration.queue_fixture import QueueUnderTest
from tests.integration.unix_session import DAEMON, session  # noqa: F401 - a fixture is found where it is named

EXAMPLES = int(os.environ.get("EXAMPLES", "8"))
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
TRIED = [each for each in OPERATIONS.values() if not (each.media == EVENTS or each.is_of_page or each.name == "stop")]
CHANGES = tuple(
    f"/jobs/{verb}" for verb in ("cancel", "hold", "release", "retry", "suspend", "resume", "priority", "edit")
)
BATCH = 4
# More memory than any machine has: no generated job ever starts, even if a generated request releases it.
NEVER = {"min-free-mem-mb": "1e12"}


def test_the_document_and_the_routes_have_the_same_operations(own_home: Path) -> None:
    async def routes() -> set[tuple[str, str]]:
        database, _ = open_database(own_home / "queue.db")
        with contextlib.closing(database):
            engine, me = LocalEngine(own_home), this_process("test")
            suspender = LocalSuspender(own_home / "suspending", engine.queue)
            loop = Loop(database, QueueLedger(open_ledger(), me), engine, SystemClock(), me, suspender=suspender)
            return set(Routes(loop, lambda _: None, 0.0).table)

    own_home.mkdir()
    described = {(each.method, each.path) for each in OPERATIONS.values() if not each.is_of_page}
    assert asyncio.run(routes()) == described


def test_the_daemon_serves_the_generated_document(queue: QueueUnderTest, session: requests.Session) -> None:  # noqa: F811
    answer = session.get(f"{DAEMON}/openapi.json", timeout=30)
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.content == document()


def test_every_operation_has_a_unique_name() -> None:
    paths = json.loads(document())["paths"]
    names = [operation["operationId"] for path in paths.values() for operation in path.values()]
    assert len(names) == len(set(names)) == len(OPERATIONS)


def test_every_option_of_submit_is_described() -> None:
    sent = {name for name, option in COMMAND_LINE_OPTIONS.items() if option.is_sent}
    described = json.loads(document())["components"]["schemas"]["SubmissionBody"]["properties"]["options"]
    assert sent <= set(described["properties"])


@pytest.mark.timeout(300 if EXAMPLES < 50 else 7200)
@pytest.mark.usefixtures("unmeasured")
def test_every_generated_request_is_answered_as_described(queue: QueueUnderTest, session: requests.Session) -> None:  # noqa: F811
    fill(queue)
    schema = schemathesis.openapi.from_dict(closed(describe(TRIED)))
    for described in sorted(TRIED, key=lambda each: each.name == "clean"):  # last: it removes the finished jobs
        operation = schema[described.path][described.method]
        assert 200 in ask(operation, GenerationMode.POSITIVE, session), f"{described.name} never succeeded"
        if described.query or described.body or "{" in described.path:
            ask(operation, GenerationMode.NEGATIVE, session)
    assert queue.get("/status")["under_way"] == 0


def closed(description: dict[str, Any]) -> dict[str, Any]:
    """Forbid undescribed keys: clients must accept unknown keys, but the document has to describe all of them."""
    for schema in description["components"]["schemas"].values():
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
    return description


def fill(queue: QueueUnderTest) -> None:
    """Submit jobs of many kinds, so that answers have content, and pause the queue."""
    queue.submit("true", gpus=0)
    queue.submit("false", gpus=0, retries=1, name="broken")
    queue.submit("true", vram="1G", tag="night")
    queue.wait()
    queue.post("/pause")
    faulty = {f"SIM-{number}": {"ecc_uncorrected": 1, "throttle": ["hw-thermal"]} for number in range(2)}
    (queue.home / "simulated" / "health.json").write_text(json.dumps(faulty))
    table = "index,seed\n0,1\n1,2\n"
    assert queue.submit("echo", "{index}", "{seed}", table=table, concurrency=2, gpus=0, **NEVER) == BATCH
    queue.submit("true", hold=True, **NEVER)
    queue.submit("true", after="6", gpus=0, **NEVER)


def ask(operation: Any, mode: GenerationMode, session: requests.Session) -> set[int]:  # noqa: F811
    """Send generated requests, valid or invalid by `mode`, and return the status codes of the answers."""
    statuses: set[int] = set()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), known=st.none() | st.integers(1, 7))
    def check(case: Any, known: int | None) -> None:
        make_harmless(case, known)
        response = case.call(base_url=DAEMON, session=session, timeout=60)
        statuses.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    check()
    return statuses


def make_harmless(case: Any, known: int | None) -> None:
    """Keep generated requests from running a command, waiting or opening a port; `known` is an existing job."""
    if known is not None:
        ask_about(case, known)
    if case.path.endswith("/wait") and is_number(case.query.get("timeout", "30")):
        case.query["timeout"] = "0.01"
    body = case.body
    if not isinstance(body, dict):
        return
    if case.path.endswith(("/submissions", "/submissions/preview", "/resubmit")):
        command = body.get("command")
        body["command"] = ["true", *command] if isinstance(command, list) else ["true"]
        typed = body["options"] if isinstance(body.get("options"), dict) else {}
        body["options"] = {**typed, **NEVER, **({"array": "0-3"} if typed.get("array") else {})}
    if case.path.endswith("/web"):
        body.update(address="127.0.0.1", port=0)


def ask_about(case: Any, job_id: int) -> None:
    """Point the request at an existing job."""
    if "id" in case.path_parameters:
        is_of_group = "/batches/" in case.path or "/sweeps/" in case.path
        case.path_parameters["id"] = BATCH if is_of_group else job_id
    if "ids" in case.query:
        case.query["ids"] = str(job_id)
    if isinstance(case.body, dict) and case.path.endswith(CHANGES):
        case.body.pop("where", None)
        case.body["ids"] = str(job_id)
    if isinstance(case.body, dict) and case.path.endswith("/forget"):
        case.body = {"all": True}


def is_number(value: object) -> bool:
    try:
        return float(str(value)) >= 0
    except ValueError:
        return False
