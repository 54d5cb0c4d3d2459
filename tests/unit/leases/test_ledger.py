import contextlib
import fcntl
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.core.lease import Claim, FixedMemory, Holder, Lease, Need, Share, Ticket
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.leases import ledger as ledger_module
from gpuyard.leases.ledger import Ledger
from gpuyard.leases.ledger_mutex import hold_mutex
from gpuyard.leases.lock_file import take_over
from gpuyard.system.process_identity import this_process, user_name
from tests.unit.leases import DEADLINE_S, ME, as_root, child, nothing, take, wait_for_word

A_RECORD = b'{"holder": {"uid": 0, "user": "root", "pid": 1}, "shares": [{"device_id": "G0"}]}'


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    folder = tmp_path / "ledger"
    folder.mkdir()
    return Ledger(folder)


@contextlib.contextmanager
def held(path: Path, content: bytes) -> Iterator[None]:
    path.write_bytes(content)
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    path.unlink(missing_ok=True)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def live(ledger: Ledger) -> tuple[tuple[Lease, ...], tuple[Ticket, ...]]:
    """What somebody who claims is shown."""
    seen: list[tuple[tuple[Lease, ...], tuple[Ticket, ...]]] = []
    ledger.claim(ME, lambda leases, tickets: seen.append((leases, tickets)), DEADLINE_S)
    return seen[0]


def test_a_lease_is_seen_with_its_shares_and_its_holder_until_it_is_released(ledger: Ledger) -> None:
    lease = ledger.claim(this_process("train"), take("G0", "G1", memory_mb=4096.0), DEADLINE_S)
    assert lease is not None
    (seen,) = ledger.leases()
    assert seen.id == lease.lease.id
    assert [(share.device_id, share.memory_mb, share.is_exclusive) for share in seen.shares] == [
        ("G0", 4096.0, False),
        ("G1", 4096.0, False),
    ]
    assert (seen.holder.uid, seen.holder.user, seen.holder.label) == (os.getuid(), user_name(os.getuid()), "train")
    assert live(ledger)[0] == (seen,)
    lease.release()
    assert ledger.leases() == ()
    assert names(ledger.folder) == ["mutex"]


def test_an_unused_ledger_is_empty_and_stays_untouched(ledger: Ledger, tmp_path: Path) -> None:
    assert (ledger.leases(), ledger.tickets()) == ((), ())
    assert names(ledger.folder) == []
    assert Ledger(tmp_path / "nowhere").leases() == ()


def test_a_ticket_keeps_its_need_and_ends_with_the_lease_it_led_to(ledger: Ledger) -> None:
    need = Need(devices=2, memory=FixedMemory(4096.0), only=("G0", "G1"))
    ticket = ledger.take_ticket(ME, need, 3, DEADLINE_S)
    ((seen,), _) = (ledger.tickets(), None)
    assert (seen.id, seen.need, seen.priority) == (ticket.id, need, 3)
    assert ledger.claim(ME, nothing, DEADLINE_S, ticket) is None
    assert live(ledger)[1] == (seen,), "whoever was refused still waits"
    lease = ledger.claim(ME, take("G0"), DEADLINE_S, ticket)
    assert lease is not None
    assert ledger.tickets() == ()
    lease.release()


def test_the_user_is_the_owner_of_the_file_and_the_time_the_files_own(ledger: Ledger) -> None:
    forged = Holder(uid=4242, user="somebody-else", pid=1, label="mine")
    lease = ledger.claim(forged, take("G0"), DEADLINE_S)
    assert lease is not None
    os.utime(lease.path, (0, 0))
    (seen,) = ledger.leases()
    assert (seen.holder.uid, seen.holder.user) == (os.getuid(), user_name(os.getuid()))
    assert abs(seen.since - lease.lease.since) < 5
    lease.release()


def test_a_label_plays_no_tricks_on_who_reads_it_and_hides_no_lease(ledger: Ledger) -> None:
    forged = Holder(uid=0, user="x", pid=1, label="\x1b[2Jgone" + "x" * 10_000)
    for holder in (forged, this_process("\x1b[2Jgone" + "x" * 1_000_000)):
        lease = ledger.claim(holder, take("G0"), DEADLINE_S)
        assert lease is not None
        (seen,) = ledger.leases()
        assert (seen.holder.label or "").startswith("?[2Jgonexxx")
        assert len(seen.holder.label or "") == 200
        lease.release()


def test_a_lease_that_would_not_be_read_is_refused_not_granted_unseen(ledger: Ledger) -> None:
    with pytest.raises(EnvironmentFault, match="cannot be written: File too large"):
        ledger.claim(ME, take(*(f"G{number}" for number in range(10_000))), DEADLINE_S)
    assert names(ledger.folder) == ["mutex"]


def test_of_several_claims_all_are_granted_or_none(ledger: Ledger) -> None:
    one, too_large = take("G0")((), ()), take(*(f"G{number}" for number in range(10_000)))((), ())
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        ledger.claim_all(lambda leases, tickets: [(ME, one), (ME, too_large)], DEADLINE_S)
    assert ledger.leases() == ()
    assert names(ledger.folder) == ["mutex"]


def test_a_reader_waits_for_a_writer(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """To see whether a file is held one has to try its lock, and for that moment it seems held to everybody else."""
    monkeypatch.setattr(ledger_module, "_READ_TIMEOUT_S", 0.0)
    with hold_mutex(ledger.folder, DEADLINE_S), pytest.raises(EnvironmentFault, match="was busy"):
        ledger.leases()
    assert ledger.leases() == ()


@as_root
def test_a_dead_lease_of_another_user_is_not_used_again_for_ones_own(ledger: Ledger) -> None:
    """Whose file it is says whose lease it is."""
    (ledger.folder / "theirs.lease").write_bytes(A_RECORD)
    os.chown(ledger.folder / "theirs.lease", 4242, 4242)
    lease = ledger.claim(ME, take("G0"), DEADLINE_S)
    assert lease is not None
    assert [seen.holder.uid for seen in ledger.leases()] == [ME.uid]
    lease.release()


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x00\xff\xfe garbage", id="bytes"),
        pytest.param(A_RECORD[:-9], id="half a record"),
        pytest.param(A_RECORD.replace(b"root", b"r" * 100_000), id="huge"),
        pytest.param(b'{"x": ' + b"[" * 60_000, id="nested deeply"),
        pytest.param(A_RECORD.replace(b"root", b"\xff\xfe"), id="not UTF-8"),
        pytest.param(A_RECORD.replace(b'"pid": 1', b'"pid": "one"'), id="a pid that is no number"),
        pytest.param(A_RECORD.replace(b'{"device_id": "G0"}', b""), id="no devices"),
        pytest.param(b"[]", id="a list"),
    ],
)
def test_garbage_is_no_lease_and_no_ticket_and_is_not_removed_while_held(ledger: Ledger, content: bytes) -> None:
    lease, ticket = ledger.folder / "x.lease", ledger.folder / "x.ticket"
    with held(lease, content), held(ticket, content):
        assert live(ledger) == ((), ())
        assert (ledger.leases(), ledger.tickets()) == ((), ())
        assert (lease.read_bytes(), ticket.read_bytes()) == (content, content)


@given(st.one_of(st.binary(max_size=200), st.integers(0, len(A_RECORD)).map(lambda end: A_RECORD[:end])))
def test_no_file_content_blocks_other_processes(content: bytes) -> None:
    folder = Path(os.environ["GPUYARD_HOME"])
    folder.mkdir(exist_ok=True)
    ledger = Ledger(folder)
    with held(folder / "x.lease", content), held(folder / "x.ticket", content):
        leases, tickets = live(ledger)
    assert tickets == ()
    assert len(leases) == (content == A_RECORD)


def test_endless_numbers_in_a_record_are_harmless(ledger: Ledger) -> None:
    content = A_RECORD.replace(b'"pid": 1', b'"pid": 1' + b"0" * 400)
    with held(ledger.folder / "x.lease", content):
        assert len(live(ledger)[0]) == 1


def hold_both(connection: Connection, folder: Path) -> None:
    ledger = Ledger(folder)
    lease = ledger.claim(this_process(), take("G0"), DEADLINE_S)
    ticket = ledger.take_ticket(this_process(), Need(), 0, DEADLINE_S)
    assert lease is not None
    connection.send((lease.lease.id, ticket.id))
    if wait_for_word(connection) == "share":
        lease.share()
        connection.send("shared")
        wait_for_word(connection)


def test_what_the_dead_held_is_free_and_the_next_claim_clears_it_away(ledger: Ledger) -> None:
    with child(hold_both, ledger.folder) as holder:
        lease_id, ticket_id = holder.hear()
        leases, tickets = live(ledger)
        assert ([each.id for each in leases], [each.id for each in tickets]) == ([lease_id], [ticket_id])
        assert leases[0].holder.pid == holder.pid
        holder.kill()
    assert (ledger.leases(), ledger.tickets()) == ((), ())
    assert len(names(ledger.folder)) == 3, "who only reads removes nothing"
    assert live(ledger) == ((), ())
    assert names(ledger.folder) == ["mutex"]


def test_a_shared_lease_is_handed_over_to_another_process(ledger: Ledger) -> None:
    with child(hold_both, ledger.folder) as holder:
        lease_id, _ = holder.hear()
        holder.tell("share")
        holder.hear()
        descriptor = take_over(ledger.folder / f"{lease_id}.lease")
        holder.kill()
    assert [lease.id for lease in live(ledger)[0]] == [lease_id]
    os.close(descriptor)
    assert live(ledger)[0] == ()


def test_a_lease_that_was_left_to_a_program_lives_as_long_as_the_program(ledger: Ledger) -> None:
    lease = ledger.claim(this_process(), take("G0"), DEADLINE_S)
    assert lease is not None
    program = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[lease.descriptor])
    lease.leave()
    assert [each.id for each in live(ledger)[0]] == [lease.lease.id]
    program.communicate(timeout=DEADLINE_S)
    assert live(ledger)[0] == ()


def test_one_can_end_a_lease_of_ones_own_by_its_id(ledger: Ledger) -> None:
    lease = ledger.claim(ME, take("G0"), DEADLINE_S)
    assert lease is not None
    with pytest.raises(UserError, match="there is no lease 'nonsense'") as told:
        ledger.end("nonsense")
    assert lease.lease.id in (told.value.hint or "")
    ledger.end(lease.lease.id)
    assert live(ledger)[0] == ()
    lease.release()


def run_out_of_descriptors(connection: Connection, folder: Path) -> None:
    ledger = Ledger(folder)
    live(ledger)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    # One more for the mutex, and none to look into a lease with.
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 1, lowest_free + 1))
    try:
        connection.send(live(ledger))
    except EnvironmentFault as error:
        connection.send(str(error))


def test_a_process_without_descriptors_takes_no_lease_for_free(ledger: Ledger) -> None:
    with child(hold_both, ledger.folder) as holder, child(run_out_of_descriptors, ledger.folder) as other:
        holder.hear()
        assert "cannot be" in other.hear()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32k,nr_inodes=8", "none", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no small disk can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@as_root
def test_a_full_disk_gives_one_clear_error_and_leaves_no_half_file(small_disk: Path) -> None:
    ledger = Ledger(small_disk)
    assert live(ledger) == ((), ())
    fill(small_disk / "big")
    for attempt in (
        lambda: ledger.claim(ME, take("G0"), DEADLINE_S),
        lambda: ledger.take_ticket(ME, Need(), 0, DEADLINE_S),
    ):
        with pytest.raises(EnvironmentFault, match=f"{small_disk} cannot be written: No space left") as told:
            attempt()
        assert "free some disk space" in (told.value.hint or "")
        assert names(small_disk) == ["big", "mutex"]
    (small_disk / "big").unlink()
    lease = ledger.claim(ME, take("G0"), DEADLINE_S)
    assert lease is not None
    lease.release()


@as_root
def test_a_disk_without_room_for_another_file_gives_the_same_error(small_disk: Path) -> None:
    with contextlib.suppress(OSError):
        for number in range(20):
            (small_disk / str(number)).touch()
    with pytest.raises(EnvironmentFault, match="cannot be written: No space left"):
        Ledger(small_disk).claim(ME, take("G0"), DEADLINE_S)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)


def test_a_record_is_plain_json_for_other_programs(ledger: Ledger) -> None:
    lease = ledger.claim(this_process("train"), take("G0"), DEADLINE_S)
    assert lease is not None
    record = msgspec.json.decode(lease.path.read_bytes())
    assert record["shares"] == [
        {"device_id": "G0", "memory_mb": None, "load_percent": None, "is_exclusive": True, "foreign_mb": None}
    ]
    assert record["holder"]["pid"] == os.getpid()
    lease.release()


# Amended


def amend(ledger: Ledger, lease_id: str, *shares: Share) -> None:
    """As one who claims does it, while nobody else looks."""

    def decide(leases: tuple[Lease, ...], tickets: tuple[Ticket, ...]) -> None:
        ledger.amend(lease_id, Claim(shares=shares))

    ledger.claim(ME, decide, DEADLINE_S)


def test_what_an_amended_lease_is_for_may_be_shorter_or_longer_than_before(ledger: Ledger) -> None:
    lease = ledger.claim(this_process("train"), take("G0", memory_mb=4096.0), DEADLINE_S)
    assert lease is not None
    for shares in ((), tuple(Share(device_id=f"G{number}") for number in range(9)), (Share(device_id="G1"),)):
        amend(ledger, lease.lease.id, *shares)
        assert [each.shares for each in ledger.leases()] == ([shares] if shares else [])
    [seen] = ledger.leases()
    assert (seen.id, seen.holder.label) == (lease.lease.id, "train")
    lease.release()
    assert ledger.leases() == ()


def test_an_amended_lease_keeps_its_holders_and_is_cleared_away_when_they_are_gone(ledger: Ledger) -> None:
    lease = ledger.claim(ME, take("G0"), DEADLINE_S)
    assert lease is not None
    amend(ledger, lease.lease.id)
    assert ledger.leases() == ()
    assert len(names(ledger.folder)) == 2, "it is there, and for nothing"
    lease.leave()
    live(ledger)
    assert names(ledger.folder) == ["mutex"]


def test_what_is_no_record_and_what_is_gone_cannot_be_amended(ledger: Ledger) -> None:
    live(ledger)
    amend(ledger, "nobody", Share(device_id="G0"))
    with held(ledger.folder / "odd.lease", b"no record"):
        amend(ledger, "odd", Share(device_id="G0"))
        assert (ledger.folder / "odd.lease").read_bytes() == b"no record"
    assert ledger.leases() == ()


@as_root
def test_another_users_lease_cannot_be_amended(ledger: Ledger) -> None:
    live(ledger)
    path = ledger.folder / "theirs.lease"
    with held(path, A_RECORD):
        os.chown(path, 4242, 4242)
        with pytest.raises(EnvironmentFault):
            amend(ledger, "theirs")
        assert path.read_bytes() == A_RECORD
