"""Faults of the daemon: its lock, its sockets and access to them, its loop, its client, its notifications."""

from tests.faults.fault import Fault

_DAEMON = "src/gpuyard/daemon"
_WEB = "tests/unit/daemon/web"
_GATE = f"{_WEB}/test_access_rules.py"
_LOOP = "tests/unit/daemon/test_loop.py"
_TESTS = "tests/integration"
_FAULTS = "tests/integration/test_queue_faults.py"

FAULTS = (
    # One daemon per queue, for one user
    Fault(
        id="daemon-two-at-once",
        file="src/gpuyard/connect/daemon_lock.py",
        old="    while not try_lock(descriptor):\n",
        new="    while not try_lock(descriptor, shared=True):\n",
        breaks="Two daemons serve one queue, and start every job twice.",
        near=(f"{_TESTS}/test_daemon_lock.py",),
    ),
    Fault(
        id="daemon-other-users-are-served",
        file=f"{_DAEMON}/server/unix_socket.py",
        old="    return None if uid in (os.getuid(), 0) else",
        new="    return None if uid >= 0 else",
        breaks="Any user of the machine runs commands as the owner of the queue.",
        near=(f"{_TESTS}/test_daemon_http.py::test_another_user_is_not_served",),
    ),
    Fault(
        id="daemon-socket-open-to-all",
        file=f"{_DAEMON}/server/unix_socket.py",
        old="    umask = os.umask(0o177)\n",
        new="    umask = os.umask(0o000)\n",
        breaks="Every user can open the daemon's socket, and only one check is left.",
        near=(f"{_TESTS}/test_daemon_http.py::test_only_the_owner_can_use_the_socket_under_any_umask",),
    ),
    # Access to the web page
    Fault(
        id="daemon-host-unchecked",
        file=f"{_DAEMON}/web/access_rules.py",
        old="    if not _is_own_host(host, rules):\n",
        new="    if not host:\n",
        breaks="A website with a DNS name that points at 127.0.0.1 reads and changes the queue.",
        near=(_GATE,),
    ),
    Fault(
        id="daemon-origin-unchecked",
        file=f"{_DAEMON}/web/access_rules.py",
        old='    if request.headers.get("origin", f"http://{host}") != f"http://{host}":\n',
        new='    if request.headers.get("origin") == "null":\n',
        breaks="Another website sends changes to the queue through the user's browser.",
        near=(_GATE,),
    ),
    Fault(
        id="daemon-any-token-is-accepted",
        file=f"{_DAEMON}/web/access_rules.py",
        old="return Credential.TOKEN if _is_same(token, rules.token) else Credential.WRONG_TOKEN",
        new="return Credential.TOKEN if token else Credential.WRONG_TOKEN",
        breaks="Any token is accepted.",
        near=(_GATE,),
    ),
    Fault(
        id="daemon-watching-needs-no-right",
        file=f"{_DAEMON}/web/access_rules.py",
        old="            _check_right(target_request(target), rules)\n",
        new="            target_request(target)\n",
        breaks="A read-only page shows the environment of jobs to viewers of the event stream.",
        near=(_GATE,),
    ),
    Fault(
        id="daemon-read-only-page-changes-jobs",
        file=f"{_DAEMON}/web/access_rules.py",
        old='    if rules.is_read_only and request.method == "POST":\n',
        new='    if rules.is_read_only and request.method == "PUT":\n',
        breaks="A read-only page can cancel jobs.",
        near=(_GATE,),
    ),
    Fault(
        id="daemon-forms-change-the-queue",
        file=f"{_DAEMON}/web/access_rules.py",
        old='    if _JSON.fullmatch(headers.get("content-type", "")) is None:\n',
        new='    if "content-type" not in headers:\n',
        breaks="A form on another website submits jobs.",
        near=(_GATE,),
    ),
    Fault(
        id="daemon-page-of-another-user",
        file=f"{_DAEMON}/web/peer_user.py",
        old="    return None if owner.uid in (me, 0) else",
        new="    return None if owner.uid >= 0 else",
        breaks="Another user of the machine who obtains the cookie can use the page.",
        near=(f"{_WEB}/test_peer_user.py",),
    ),
    Fault(
        id="daemon-token-file-for-all",
        file=f"{_DAEMON}/web/open_page.py",
        old="mode=0o600, is_synced=False)",
        new="mode=0o644, is_synced=False)",
        breaks="Every user of the machine can read the page's token.",
        near=(f"{_WEB}/test_token_file.py",),
    ),
    # Clients that delay others
    Fault(
        id="daemon-body-limit-unread",
        file=f"{_DAEMON}/server/http_parser.py",
        old="    if len(value) > 18 or int(value) > max_bytes:\n",
        new="    if len(value) > 18:\n",
        breaks="One request fills the daemon's memory.",
        near=(f"{_TESTS}/test_daemon_http.py::test_a_body_that_is_too_long_or_of_unknown_length_is_refused",),
    ),
    Fault(
        id="daemon-silent-clients-stay",
        file=f"{_DAEMON}/server/connection.py",
        old="            self._set_timer(limits.silent_s, self._transport.abort)\n",
        new="            self._cancel_timer()\n",
        breaks="Clients that send nothing use up all connections, and no other client is served.",
        near=(f"{_TESTS}/test_daemon_http.py::test_silent_clients_are_dropped_after_a_timeout",),
    ),
    Fault(
        id="daemon-slow-viewer-fills-memory",
        file=f"{_DAEMON}/server/connection.py",
        old="        if self._transport.get_write_buffer_size() > self._server.limits.unread_bytes:\n",
        new="        if self._transport.get_write_buffer_size() < 0:\n",
        breaks="For a browser that sleeps, the daemon keeps all unsent updates in memory.",
        near=(
            f"{_TESTS}/test_daemon_http_crowds.py",
            f"{_TESTS}/test_events.py::test_a_viewer_that_stops_reading_is_dropped_and_the_others_continue",
        ),
    ),
    Fault(
        id="daemon-handler-of-a-gone-client-goes-on",
        file=f"{_DAEMON}/server/connection.py",
        old="        if self._awaited is not None:\n            self._awaited.cancel()\n        if self._stop_stream",
        new="        if self._stop_stream",
        breaks="Every interrupted `gpuyard wait` leaves a task behind in the daemon.",
        near=(f"{_TESTS}/test_daemon_http.py::test_the_handler_of_a_client_that_goes_away_is_cancelled",),
    ),
    # The loop
    Fault(
        id="daemon-submission-does-not-wake-the-loop",
        file=f"{_DAEMON}/api/submit.py",
        old="        scheduler.wake()\n",
        new="",
        breaks="A job that is submitted to an idle queue starts only when something else happens.",
        near=(_LOOP,),
    ),
    Fault(
        id="daemon-waiters-are-not-woken",
        file=f"{_DAEMON}/loop.py",
        old="            self.finish_signal.announce()\n",
        new="",
        breaks="`gpuyard wait` returns up to half a minute after the last job has ended.",
        near=(_LOOP,),
    ),
    Fault(
        id="daemon-failing-listener-stops-the-queue",
        file=f"{_DAEMON}/loop.py",
        old="            except Exception:  # noqa: BLE001 - a bug in metrics",
        new="            except OSError:  # a bug in metrics",
        breaks="A bug in the metrics or the notifications keeps jobs from starting.",
        near=(_LOOP,),
    ),
    Fault(
        id="daemon-configuration-is-not-followed",
        file=f"{_DAEMON}/loop.py",
        old="        if stamp != self._config_stamp:\n",
        new="        if stamp == self._config_stamp:\n",
        breaks="A changed configuration takes effect only after a restart of the daemon.",
        near=(_LOOP,),
    ),
    Fault(
        id="daemon-damaged-database-is-used-on",
        file=f"{_DAEMON}/loop.py",
        old="        if error.is_damage:\n            self.fail(error)\n",
        new="        if error.is_damage:\n            self._retry_later(str(error))\n",
        breaks="A daemon with a damaged database retries forever instead of setting the database aside.",
        near=(_LOOP,),
    ),
    Fault(
        id="daemon-ledger-is-not-watched",
        file=f"{_DAEMON}/loop.py",
        old="        self._loop.add_reader(watch.fileno(), self._on_ledger_change)\n",
        new="",
        breaks="A job that waits for a script's GPU starts a second after the script has ended instead of at once.",
        near=(_LOOP,),
    ),
    Fault(
        id="daemon-same-submission-twice-under-way",
        file=f"{_DAEMON}/api/submit.py",
        old="        task = self._arriving.get(token) if token else None\n",
        new="        task = None\n",
        breaks="A large submission fails if the client repeats it while it is still being stored.",
        near=(f"{_TESTS}/test_queue_clients.py::test_the_same_large_submission_from_two_clients_at_once_counts_once",),
    ),
    Fault(
        id="daemon-unchanged-answers-are-sent-again",
        file=f"{_DAEMON}/server/event_stream.py",
        old="        if event != self._sent.get(target):\n",
        new="        if event:\n",
        breaks="Every viewer gets the whole queue twice a second although nothing has changed.",
        near=("tests/unit/daemon/server/test_event_stream.py",),
    ),
    Fault(
        id="daemon-new-jobs-get-old-logs",
        file=f"{_DAEMON}/main.py",
        old="            scheduler.store.reserve_ids_up_to(highest)\n",
        new="            pass\n",
        breaks="After a damaged database was set aside, new jobs append to the logs of older ones.",
        near=(
            f"{_TESTS}/test_queue_faults.py::test_a_damaged_database_is_set_aside_and_its_ids_and_logs_are_not_reused",
        ),
    ),
    # The client
    Fault(
        id="daemon-client-repeats-what-may-be-done",
        file="src/gpuyard/connect/fast_http.py",
        old="            if not may_repeat:\n",
        new="            if not may_repeat and not message:\n",
        breaks="A change is made twice if its response was lost.",
        near=(f"{_TESTS}/test_daemon_client.py",),
    ),
    Fault(
        id="daemon-client-reads-the-last-answer",
        file="src/gpuyard/connect/fast_http.py",
        old="            if not is_kept:  #",
        new="            if self._socket is None:  #",
        breaks="A request after a timeout gets the response to the earlier request.",
        near=(f"{_TESTS}/test_daemon_client.py",),
    ),
    Fault(
        id="daemon-in-its-starters-session",
        file="src/gpuyard/connect/autostart.py",
        old="                start_new_session=True,\n",
        new="",
        breaks="Ctrl-C in the shell that started the daemon ends it.",
        near=(f"{_TESTS}/test_daemon_client.py",),
    ),
    # Notifications
    Fault(
        id="daemon-notification-hangs",
        file=f"{_DAEMON}/notify/send_message.py",
        old="        if status is None and time.monotonic() < self._deadline:\n",
        new="        if status is None:\n",
        breaks="A notification command that hangs is never killed, and no later notification is sent.",
        near=(f"{_TESTS}/test_notifying.py::test_a_command_that_hangs_is_killed_with_its_children",),
    ),
    Fault(
        id="daemon-notification-reveals-its-secret",
        file=f"{_DAEMON}/notify/send_message.py",
        old="        shown = redact(last, self.target) if is_url(self.target) else last\n",
        new="        shown = last\n",
        breaks="The daemon's log shows the secret of a notification's URL.",
        near=(
            f"{_TESTS}/test_notifying.py::test_a_service_that_fails_twice_is_reported_without_its_secrets",
            f"{_TESTS}/test_notifying.py::test_an_address_in_a_service_s_error_is_not_repeated",
        ),
    ),
)
