"""Ray as a site: each element is one Ray job.

It talks HTTP. Ray's own job client would load all of Ray into the daemon, has no timeouts, and follows RAY_ADDRESS.

- If Ray says that an id exists, it took our earlier request, even if the response was lost.
- Ray has no priorities, so it gets only as much as is free: its own queue stays short.
- Ray stops a pending job only when it would start; until then the job counts as cancelled here."""

import contextlib
import http.client
import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gpuyard.config import RayConfig
from gpuyard.engines.cluster import ray_api
from gpuyard.engines.cluster.ray_api import Capacity, gist, id_of
from gpuyard.engines.cluster.site import (
    ClusterNode,
    ClusterSubmission,
    Sighting,
    SiteRefused,
    SiteReport,
    SiteUnreachable,
)
from gpuyard.model.cluster_terms import ClusterTerms, Offer, amount_needed
from gpuyard.model.job import SiteRequest

# For connecting, for the start of a response, for the whole of it, and for many requests. So no call takes a minute.
_ANSWER_WITHIN_S = 12.0
_JOBS = "/api/jobs/"
_NODES = "/api/v0/nodes?limit=10000"


class RaySite:
    name = "ray"
    most_in_submission = 100

    def __init__(
        self, settings: RayConfig, environment: Mapping[str, str] = os.environ, *, limit_s: float | None = None
    ) -> None:
        self._limit_s = limit_s or _ANSWER_WITHIN_S
        self._settings = settings
        self._address = ray_api.address_of(settings, environment)
        self._token = _token(environment)
        self._stopped: set[str] = set()
        self._pending_since: dict[tuple[str, int], float] = {}
        self._use_reported = (0.0, 0.0)  # Ray's time of its last report of use, and ours when we first saw it

    def submit(self, submission: ClusterSubmission) -> str:
        until = time.monotonic() + self._limit_s
        if submission.without:  # Ray would keep a job pending that no other node can take
            self.check(submission.terms, submission.without)
        for index in range(submission.count):
            try:
                self._submit(ray_api.request_of(submission, index, self._settings.card_mb))
            except SiteRefused as error:
                if index == 0:
                    raise
                raise SiteUnreachable(f"Ray took {index} of {submission.count}, and then refused: {error}") from error
            if time.monotonic() > until:
                raise SiteUnreachable(f"Ray took {index + 1} of {submission.count} in {self._limit_s:.0f} s")
        return ""

    def _submit(self, submission: Mapping[str, Any]) -> None:
        status, body = self._ask("POST", _JOBS, submission)
        text = body.decode("utf-8", "replace")
        if status == HTTPStatus.OK or (status >= HTTPStatus.BAD_REQUEST and "already exists" in text):
            return
        # The dashboard forwards submissions to an agent, and reports the agent's refusal as an error of its own.
        if status == HTTPStatus.BAD_REQUEST or f"status code {HTTPStatus.BAD_REQUEST.value}" in text:
            raise SiteRefused(gist(text))
        raise self._failure(status, body)

    def request(self, submission: ClusterSubmission, number: int) -> SiteRequest:
        return ray_api.described(submission, number, self._settings.card_mb)

    def check(self, terms: ClusterTerms, without: Sequence[str] = ()) -> None:
        """Raise SiteRefused if none of Ray's other nodes is large enough for a job on these terms."""
        nodes = ray_api.resources_of(self._get(_NODES), without)
        if without and not nodes:
            raise SiteRefused("no other node is alive", hint="`ray status` lists what there is")
        if never := ray_api.never_fits(terms, self._settings.card_mb, nodes):
            raise SiteRefused(never, hint="ask for less, or add a node; `ray status` lists what there is")

    def report(self, live: Sequence[ClusterSubmission]) -> SiteReport:
        card_mb = self._settings.card_mb
        terms = {submission.token: submission.terms for submission in live}
        records = ray_api.records_of(self._get(_JOBS)) if live else []
        by_ref = {ray_api.ref_of(record.submission_id): record for record in records}
        ours = {ref: record for ref, record in by_ref.items() if ref is not None and ref[0] in terms}
        self._stopped &= {id_of(*ref) for ref, record in ours.items() if record.status == "PENDING"}
        now = time.monotonic()
        pending = (ref for ref, record in ours.items() if record.status == "PENDING")
        self._pending_since = {ref: self._pending_since.get(ref, now) for ref in pending}
        sightings = {
            ref: ray_api.sighting_of(
                record, is_stopped=id_of(*ref) in self._stopped, pending_s=now - self._pending_since.get(ref, now)
            )
            for ref, record in ours.items()
        }
        # Without a list of nodes Ray counts as unreachable: jobs that never fit would wait there forever. Without a
        # status only our own jobs count as using it, so that jobs do not wait forever.
        capacity = ray_api.capacity_of(self._get(_NODES), self._get("/api/cluster_status"))
        now = time.monotonic()
        if capacity.at != self._use_reported[0]:
            self._use_reported = capacity.at, now
        is_old = now - self._use_reported[1] > 60.0
        capacity = Capacity(nodes=capacity.nodes) if is_old else capacity
        needed = [(record, amount_needed(terms[ref[0]], card_mb)) for ref, record in ours.items()]
        free = ray_api.free_of(capacity, needed)
        offer = Offer(free=free, nodes=capacity.nodes, most_jobs=self._settings.most_jobs, card_mb=card_mb)
        return SiteReport(sightings=sightings, offer=offer)

    def cancel(self, ids: Sequence[str]) -> None:
        until = time.monotonic() + self._limit_s
        for number, each in enumerate(ids):
            if time.monotonic() > until:
                raise SiteUnreachable(f"Ray stopped {number} of {len(ids)} in {self._limit_s:.0f} s")
            status, body = self._ask("POST", f"{_JOBS}{each}/stop")
            if status not in (HTTPStatus.OK, HTTPStatus.NOT_FOUND):
                raise self._failure(status, body)
            self._stopped.add(each)

    def output(self, sighting: Sighting) -> bytes | None:
        status, body = self._ask("GET", f"{_JOBS}{sighting.id}/logs")
        if status == HTTPStatus.NOT_FOUND:
            return None
        if status != HTTPStatus.OK:
            raise self._failure(status, body)
        return ray_api.logs_of(body) or None

    def nodes(self) -> list[ClusterNode]:
        return ray_api.nodes_of(self._get(_NODES))

    def run_on(self, node: ClusterNode, script: str, within_s: float) -> str:
        id_, until = f"gpuyard-doctor-{secrets.token_hex(8)}", time.monotonic() + within_s
        self._submit(ray_api.check_request(node, script, id_))
        try:
            while (record := ray_api.record_of(self._get(f"{_JOBS}{id_}"))).status in ("PENDING", "RUNNING"):
                if time.monotonic() > until:
                    raise SiteUnreachable(f"it did not answer within {within_s:.0f} s: {gist(record.message or '')}")
                time.sleep(0.5)
            status, body = self._ask("GET", f"{_JOBS}{id_}/logs")
            return ray_api.logs_of(body).decode("utf-8", "replace") if status == HTTPStatus.OK else ""
        finally:
            with contextlib.suppress(SiteUnreachable):
                self._ask("POST", f"{_JOBS}{id_}/stop")
                self._ask("DELETE", f"{_JOBS}{id_}")

    def _get(self, path: str) -> bytes:
        status, body = self._ask("GET", path)
        if status != HTTPStatus.OK:
            raise self._failure(status, body)
        return body

    def _ask(self, method: str, path: str, content: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        parts = urlsplit(self._address)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        body = None if content is None else json.dumps(content).encode()
        headers = {"Content-Type": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        connection = kind(parts.hostname or "", parts.port, timeout=self._limit_s)
        try:
            with contextlib.closing(connection):
                connection.request(method, parts.path + path, body, headers)
                answer = connection.getresponse()
                return answer.status, self._body(answer)
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: an impossible host name
            raise SiteUnreachable(
                f"there is no answer from a Ray dashboard at {self._address}: {error or type(error).__name__}",
                hint="is Ray running there? `[ray] address` in the configuration says where",
            ) from error

    def _body(self, answer: http.client.HTTPResponse) -> bytes:
        until = time.monotonic() + self._limit_s
        chunks = []
        while chunk := answer.read1(1 << 16):
            chunks.append(chunk)
            if time.monotonic() > until:
                raise TimeoutError(f"the response was incomplete after {self._limit_s:.0f} s")
        return b"".join(chunks)

    def _failure(self, status: int, body: bytes) -> SiteUnreachable:
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            hint = "put Ray's token into RAY_AUTH_TOKEN, the file that RAY_AUTH_TOKEN_PATH names, or ~/.ray/auth_token"
            return SiteUnreachable(f"Ray at {self._address} requires a token", hint=hint)
        if status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
            return SiteUnreachable(f"the server at {self._address} is no Ray dashboard, or too old")
        return SiteUnreachable(f"Ray at {self._address} failed ({status}): {gist(body.decode('utf-8', 'replace'))}")


def _token(environment: Mapping[str, str]) -> str | None:
    if environment.get("RAY_AUTH_MODE") == "disabled":
        return None
    if token := environment.get("RAY_AUTH_TOKEN", "").strip():
        return token
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    with contextlib.suppress(OSError, ValueError):
        return path.read_text("ascii").strip() or None
    return None
