"""Hostile requests: each is refused or answered, and none causes an internal error of the daemon."""

import json
from typing import Any
from urllib.parse import quote

import pytest
import requests

from gpuyard.schema.operations import EVENTS, OPERATIONS
from tests.integration.queue_fixture import QueueUnderTest
from tests.integration.unix_session import DAEMON, session  # noqa: F401 - a fixture is found where it is named

LONG, DEEP = "9" * 5000, "[" * 100_000
NUL, LONE = "\0", "\ud800"  # a lone surrogate: JSON can express it, UTF-8 cannot
VALUES: list[Any] = [
    None, True, -1, 10**30, 1e308, float("nan"), float("inf"), "", NUL, LONE, LONG, "٣", "1e400", "all",
    "1-999999999999999999", f"name={NUL}", f"tag={LONE}", "999999999999d", [None], [LONE], {"a": 1},
]  # fmt: skip
BODIES = [b"", b"null", b"[]", b"1", b'"x"', b"{", b"\0", b"\xff\xfe", DEEP.encode(), b'{"ids": ' + DEEP.encode()]
SUBMITTED = ["command", "list", "table", "cwd", "environment", "token", "configuration", "task", "tag_sharing"]
OPTIONS = [
    "name", "tag", "priority", "gpus", "vram", "retries", "grace", "time-limit", "duration", "after", "env", "stdin",
    "device", "gpu-name", "sweep", "array", "engine", "engine-option", "log-cap", "cpus", "concurrency", "sample-log",
    "stagger", "max-cpu", "max-gpu", "min-free-mem-mb", "on-reboot", "on-preempt", "vendor", "notify", "hold", LONE, "",
]  # fmt: skip
TABLES = (f"a\n{LONE}\n", 'a\n"', f"{NUL}\n1\n")
COMMANDS: list[Any] = [[""], [NUL], [LONE], ["true", LONE + NUL], ["x" * 200_000], "true '", "", "{x}"]
IN_QUERY = [value for value in VALUES if isinstance(value, str)] + ["%", "a b", "'", "../../etc/passwd", "x" * 3000]
POSTS = [each for each in OPERATIONS.values() if each.method == "POST" and each.name not in ("stop", "submit")]
GETS = [each for each in OPERATIONS.values() if each.method == "GET" and not (each.media == EVENTS or each.is_of_page)]
# No GPU has this much memory, so no accepted job ever starts.
NEVER = {"min-free-mem-mb": "1e12", "hold": True}

pytestmark = pytest.mark.usefixtures("unmeasured")


def test_no_request_body_causes_an_internal_error(queue: QueueUnderTest, session: requests.Session) -> None:  # noqa: F811
    queue.submit("true", **NEVER)
    wrong = []
    for each in POSTS:
        keys = [key for key in getattr(each.body, "__annotations__", {}) if key not in ("address", "options")]
        made: list[Any] = [
            {"port": 0, key: value} if key == "port" else {key: value} for key in keys for value in VALUES
        ]
        if "where" in keys:
            made += [{"where": {key: value}} for key in ("state", "search", "tag", "user") for value in VALUES]
        if each.name == "priority":
            made += [{"ids": "1", "priority": value} for value in VALUES]
        wrong += faults(session, each.path, [*BODIES, *map(encoded, made)])
    wrong += faults(
        session, "/v1/web", [encoded({"address": value}) for value in (NUL, LONE, "", 7, "nowhere.invalid")]
    )
    assert wrong == []


def test_no_submission_causes_an_internal_error(queue: QueueUnderTest, session: requests.Session) -> None:  # noqa: F811
    options: list[Any] = [{**NEVER, name: value} for name in OPTIONS for value in VALUES]
    made: list[dict[str, Any]] = [{"command": ["true"], "options": each} for each in [*VALUES, *options]]
    made += [{"command": ["true"], "options": NEVER, key: value} for key in SUBMITTED for value in VALUES]
    made += [{"command": command, "options": NEVER} for command in COMMANDS]
    made += [{"command": ["true", "{a}"], "table": text, "options": NEVER} for text in TABLES]
    assert faults(session, "/v1/submissions", [DEEP.encode(), *map(encoded, made)]) == []
    assert faults(session, "/v1/jobs/{id}/resubmit", list(map(encoded, made[::7]))) == []
    assert [page.text for page in pages(session) if page.status_code != 200] == []


def test_no_query_causes_an_internal_error(queue: QueueUnderTest, session: requests.Session) -> None:  # noqa: F811
    queue.submit("true", **NEVER)
    wrong = []
    for each in GETS:
        for name in each.query.__struct_fields__ if each.query else ():
            wait = "&timeout=0" if each.name == "wait" and name != "timeout" else ""
            # The longest wait takes half a minute.
            for value in ["0.01", "nan", "x"] if name == "timeout" else IN_QUERY:
                query = f"?{name}={quote(value, errors='surrogatepass')}{wait}"
                answer = session.get(DAEMON + each.path.replace("{id}", "1") + query, timeout=60)
                wrong += [(each.path, query[:300], answer.text[:300])] if answer.status_code >= 500 else []
    assert wrong == []


def encoded(body: object) -> bytes:
    return json.dumps(body).encode()


def faults(session: requests.Session, path: str, bodies: list[bytes]) -> list[tuple[str, bytes, str]]:  # noqa: F811
    """Return the requests that neither succeeded nor were refused as a mistake."""
    wrong = []
    for body in bodies:
        answer = session.post(DAEMON + path.replace("{id}", "1"), data=body, timeout=60)
        if answer.status_code >= 500 or (answer.status_code != 200 and set(answer.json()) != {"error", "hint", "code"}):
            wrong.append((path, body[:300], answer.text[:300]))
    return wrong


def pages(session: requests.Session) -> list[requests.Response]:  # noqa: F811
    """Return all pages of the list of jobs."""
    after: int | None = 0
    answers = []
    while after is not None:
        answers.append(session.get(f"{DAEMON}/v1/jobs?limit=500&after={after}", timeout=60))
        after = answers[-1].json().get("next")
    return answers
