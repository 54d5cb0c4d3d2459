"""Ray as a site: one of its jobs is one element. It is asked over HTTP, as its own job client does, which would load
all of Ray into the daemon, knows no time limits, and goes by RAY_ADDRESS whatever it is told.

- An id that is there already is one of ours that was taken, whatever became of the answer.
- Ray knows no priorities, so it is offered as much as is free: its own line is to stay short.
- It stops a job by SIGTERM to all of its processes and SIGKILL to those that are left; one that is still pending is
  only stopped when it would start, and counts as cancelled until then.
- What it keeps of jobs that are over is left to it.
"""

import contextlib
import http.client
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gpuyard.core.cluster.offer import Offer, amount_needed
from gpuyard.engines.cluster.ray_api import (
    Capacity,
    RayJobRecord,
    RaySettings,
    address_of,
    capacity_of,
    free_of,
    gist,
    id_of,
    logs_of,
    mark_of,
    records_of,
    sighting_of,
    submission_of,
)
from gpuyard.engines.cluster.site import ClusterSubmission, Mark, Sighting, SiteRefused, SiteReport, SiteUnreachable

# Of a connection, an answer's beginning, and its whole; and of many requests. So no call takes a minute.
_ANSWER_WITHIN_S = 12.0
_ALL_WITHIN_S = 20.0
_MOST_IN_PARCEL = 100
_CHUNK_BYTES = 1 << 16
_JOBS = "/api/jobs/"
_STATUS = "/api/cluster_status"
_NODES = "/api/v0/nodes?limit=10000"
# The dashboard hands submissions on to an agent, and makes an error of its own of the agent's refusal.
_PASSED_ON = f"status code {HTTPStatus.BAD_REQUEST.value}"
_TAKEN = "already exists"


class RaySite:
    """Implements `Site`, for one thread."""

    name = "ray"
    most_in_parcel = _MOST_IN_PARCEL

    def __init__(self, settings: RaySettings, environment: Mapping[str, str] = os.environ) -> None:
        """EnvironmentFault where the address is none."""
        self._settings = settings
        self._address = address_of(settings, environment)
        self._token = _token(environment)
        self._stopped: set[str] = set()

    def submit(self, parcel: ClusterSubmission) -> str:
        until = time.monotonic() + _ALL_WITHIN_S
        for index in range(parcel.count):
            try:
                self._submit(submission_of(parcel, index, self._settings.card_mb))
            except SiteRefused as error:
                if index == 0:
                    raise
                raise SiteUnreachable(f"Ray took {index} of {parcel.count}, and then refused: {error}") from error
            if time.monotonic() > until:
                raise SiteUnreachable(f"Ray took {index + 1} of {parcel.count} in {_ALL_WITHIN_S:.0f} s")
        return ""

    def _submit(self, submission: Mapping[str, Any]) -> None:
        status, body = self._ask("POST", _JOBS, submission)
        text = body.decode("utf-8", "replace")
        if status == HTTPStatus.OK or (status >= HTTPStatus.BAD_REQUEST and _TAKEN in text):
            return
        if status == HTTPStatus.BAD_REQUEST or _PASSED_ON in text:
            raise SiteRefused(f"Ray refused it: {gist(text)}")
        raise self._failure(status, body)

    def look(self, live: Sequence[ClusterSubmission]) -> SiteReport:
        now = time.time()
        terms = {parcel.token: parcel.terms for parcel in live}
        ours = {mark: record for mark, record in self._records() if mark[0] in terms} if live else {}
        self._stopped &= {id_of(*mark) for mark, record in ours.items() if record.status == "PENDING"}
        sightings = {
            mark: sighting_of(record, is_stopped=id_of(*mark) in self._stopped, now=now)
            for mark, record in ours.items()
        }
        card_mb = self._settings.card_mb
        capacity = self._capacity(now)
        free = free_of(capacity, [(record, amount_needed(terms[mark[0]], card_mb)) for mark, record in ours.items()])
        offer = Offer(free=free, total=capacity.total, most_jobs=self._settings.most_jobs, card_mb=card_mb)
        return SiteReport(sightings=sightings, offer=offer)

    def _records(self) -> Iterator[tuple[Mark, RayJobRecord]]:
        for record in records_of(self._get(_JOBS)):
            mark = mark_of(record.submission_id)
            if mark is not None:
                yield mark, record

    def _capacity(self, now: float) -> Capacity:
        """Where nobody says what there is, Ray counts as unreachable: what never fits would wait there in vain. Where
        nobody says what is in use, only ours is: others' is no reason to wait for ever."""
        return capacity_of(self._get(_NODES), self._get(_STATUS), now)

    def cancel(self, ids: Sequence[str]) -> None:
        until = time.monotonic() + _ALL_WITHIN_S
        for number, each in enumerate(ids):
            if time.monotonic() > until:
                raise SiteUnreachable(f"Ray stopped {number} of {len(ids)} in {_ALL_WITHIN_S:.0f} s")
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
        return logs_of(body) or None

    # Over HTTP

    def _get(self, path: str) -> bytes:
        status, body = self._ask("GET", path)
        if status != HTTPStatus.OK:
            raise self._failure(status, body)
        return body

    def _ask(self, method: str, path: str, content: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        """The status and the body of the answer."""
        parts = urlsplit(self._address)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        body = None if content is None else json.dumps(content).encode()
        headers = {"Content-Type": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        connection = kind(parts.hostname or "", parts.port, timeout=_ANSWER_WITHIN_S)
        try:
            with contextlib.closing(connection):
                connection.request(method, parts.path + path, body, headers)
                answer = connection.getresponse()
                return answer.status, self._body(answer)
        except (OSError, http.client.HTTPException, ValueError) as error:  # the last for names that no host can have
            raise SiteUnreachable(
                f"there is no answer from a Ray dashboard at {self._address}: {error or type(error).__name__}",
                hint="is Ray running there? `[ray] address` in the configuration says where",
            ) from error

    def _body(self, answer: http.client.HTTPResponse) -> bytes:
        until = time.monotonic() + _ANSWER_WITHIN_S
        chunks = []
        while chunk := answer.read1(_CHUNK_BYTES):
            chunks.append(chunk)
            if time.monotonic() > until:
                raise TimeoutError(f"it had not come whole after {_ANSWER_WITHIN_S:.0f} s")
        return b"".join(chunks)

    def _failure(self, status: int, body: bytes) -> SiteUnreachable:
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            hint = (
                "RAY_AUTH_TOKEN, the file that RAY_AUTH_TOKEN_PATH names, or ~/.ray/auth_token is to have Ray's token"
            )
            return SiteUnreachable(f"Ray at {self._address} lets us in with a token only", hint=hint)
        if status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
            return SiteUnreachable(f"what answers at {self._address} is no Ray dashboard, or too old a one")
        return SiteUnreachable(f"Ray at {self._address} failed ({status}): {gist(body.decode('utf-8', 'replace'))}")


def _token(environment: Mapping[str, str]) -> str | None:
    """Where Ray's own programs look for it."""
    if environment.get("RAY_AUTH_MODE") == "disabled":
        return None
    if told := environment.get("RAY_AUTH_TOKEN", "").strip():
        return told
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    try:
        return path.read_text("ascii").strip() or None
    except (OSError, ValueError):
        return None
