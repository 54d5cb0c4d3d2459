"""A stand-in for the daemon: answers its routes on its socket as a test says, and records the requests."""

import http.server
import json
import socketserver
import threading
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qsl, urlsplit

from gpuyard.client.fast_http import VERSION_FIELD
from gpuyard.version import API, __version__

Answer = Any
STATES = (
    "held", "blocked", "delayed", "queued", "running", "suspending", "suspended", "resuming", "stopping", "succeeded",
    "failed", "cancelled", "rejected",
)  # fmt: skip


class ReceivedRequest(NamedTuple):
    route: str
    query: dict[str, str]
    body: Any


class Refusal(NamedTuple):
    """An answer with a status of its own."""

    status: int
    error: str
    hint: str | None = None


class StandIn:
    """`answers` is keyed by route, such as `GET /jobs`; an answer may be a function of the request."""

    def __init__(self, home: Path, answers: dict[str, Answer] | None = None) -> None:
        self.path = home / "daemon.sock"
        self.answers = {"POST /wait/reported": {"known": True}, **(answers or {})}
        self.version: str | None = __version__
        self.requests: list[ReceivedRequest] = []
        self._server: socketserver.BaseServer | None = None

    def __enter__(self) -> Self:
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        self.path.unlink(missing_ok=True)
        self._server = _Server(str(self.path), _handler(self))
        threading.Thread(target=self._server.serve_forever, args=(0.01,)).start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()
        self.path.unlink()

    def answer(self, request: ReceivedRequest) -> Answer:
        self.requests.append(request)
        answer = self.answers.get(request.route, Refusal(404, f"no such route: {request.route}"))
        return answer(request) if callable(answer) else answer


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


def _handler(daemon: StandIn) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def _respond(self) -> None:
            url = urlsplit(self.path)
            content = self.rfile.read(int(self.headers["Content-Length"]))
            query = dict(parse_qsl(url.query, keep_blank_values=True))
            route = f"{self.command} {url.path.removeprefix(API)}"
            answer = daemon.answer(ReceivedRequest(route, query, json.loads(content) if content else None))
            status = 200
            if isinstance(answer, Refusal):
                status, answer = answer.status, {"error": answer.error, "hint": answer.hint}
            body = json.dumps(answer).encode()
            self.send_response(status)
            if daemon.version is not None:
                self.send_header(VERSION_FIELD, daemon.version)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = _respond  # noqa: N815 - as http.server calls them

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def counts(**some: int) -> dict[str, int]:
    return {**dict.fromkeys(STATES, 0), **some}


def row(job_id: int, state: str = "queued", **facts: Any) -> dict[str, Any]:
    known: dict[str, Any] = {
        "id": job_id, "name": None, "state": state, "tag": "", "priority": 0, "user": "ada",
        "command": f"python train.py --seed {job_id}", "gpus": 1, "vram_mb": 8192.0, "exclusive": False,
        "learns_memory": False, "reserved_mb": None, "estimated_mb": 8192.0, "devices": [],
        "gpu_labels": [], "attempt": 0, "submitted_at": "2026-01-02T03:04:05.678Z", "started_at": None,
        "ended_at": None, "elapsed_s": None, "waited_s": 61.0, "due_at": None, "time_limit_s": None, "status": None,
        "outcome": None, "reason": None, "array": None, "index": None, "log": None,
    }  # fmt: skip
    return {**known, **facts}


def job(job_id: int, state: str = "queued", **facts: Any) -> dict[str, Any]:
    """As `GET /jobs/17` has it."""
    known: dict[str, Any] = {
        "cwd": "/data", "stdin": None, "retries": 0, "failures": 0, "grace_s": 10.0, "duration_s": None,
        "retry_on": ["failed", "timeout", "oom", "device"], "retry_delay_s": None, "signal": None, "on_reboot": None,
        "log_cap_mb": 256.0, "output": None, "error_output": None, "values": {}, "environment_names": ["HOME", "TOKEN"],
        "dropped": [],
        "environment": None, "need": {}, "after": [], "attempts": [], "preempts": False, "on_preempt": "suspend",
        "growth": None, "advice": [], "not_before": None, "resubmitted_from": None,
        "code": {"text": None, "script": None, "snapshot": None, "snapshot_exists": None},
        "memory": {"basis": "declared", "given_mb": 8192.0, "alone": False, "runs": None, "same_command": None},
    }  # fmt: skip
    return {**row(job_id, state), **known, **facts}


def attempt(number: int, log: Path, *, is_over: bool = True, **facts: Any) -> dict[str, Any]:
    known = {
        "number": number, "pid": 4000 + number, "devices": ["SIM-0"], "lease": "l", "log": str(log),
        "error_log": None, "place": None,
        "started_at": "2026-01-02T03:04:05.678Z", "ended_at": "2026-01-02T03:05:05.678Z" if is_over else None,
        "outcome": "failed" if is_over else None, "status": 1 if is_over else None, "reason": None,
        "reserved_mb": None, "predicted_mb": None, "peaks_mb": {}, "ram_mb": None, "load_percent": None, "curve": [],
        "energy": None, "cpus": [], "cpus_used": None,
        "ran_s": 60.0, "parked": None, "suspended_at": None, "suspended_s": 0.0, "lack": None, "request": None,
    }  # fmt: skip
    return {**known, **facts}


def page(*jobs: dict[str, Any], following: str | None = None, **states: int) -> dict[str, Any]:
    state = {"counts": counts(**states), "paused": False, "draining": False, "notices": []}
    return {"jobs": list(jobs), **state, "next": following, "total": None}
