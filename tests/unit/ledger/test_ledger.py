import contextlib
import os
import resource
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.ledger import ledger as ledger_module
from gpuyard.ledger.ledger import Ledger
from gpuyard.ledger.ledger_mutex import hold_mutex
from gpuyard.model.lease import Claim, FixedMemory, Lease, Need, Share, Ticket
from gpuyard.system import file_locks as owner_locks
from gpuyard.system.processes import this_process, user_name
from tests.small_disk import mounted_disk
from tests.unit.ledger import DEADLINE_S, ME, as_root, child, nothing, take, wait_for_message

A_RECORD = b'{"holder": {"uid": 0, "user": "root", "pid": 1}, "shares": [{"device_id": "G0"}]}'


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    folder = tmp_path / "ledger"
    folder.mkdir()
    return Ledger(folder)


@contextlib.contextmanager
def held(path: Path, content: bytes) -> Iterator[None]:
    path.write_bytes(content)
    with path.open("r+b") as file:
        assert owner_locks.try_hold(file.fileno())
        yield
    path.unlink(missing_ok=True)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def live(ledger: Ledger) -> tuple[tuple[Lease, ...], tuple[Ticket, ...]]:
    """Return the leases and tickets that a claim is decided on."""
    shown: list[tuple[tuple[Lease, ...], tuple[Ticket, ...]]] = []
    ledger.claim(ME, lambda leases, tickets: shown.append((leases, tickets)), DEADLINE_S)
    return shown[0]


def test_a_lease_is_seen_with_its_shares_and_its_holder_until_it_is_released(ledger: Ledger) -> None:
    lease = ledger.claim(this_process("train"), take("G0", "G1", memory_mb=4096.0), DEADLINE_S)
    assert lease is not None
    (listed,) = ledger.leases()
    assert listed.id == lease.lease.id
    assert [(share.device_id, share.memory_mb, share.is_exclusive) for share in listed.shares] == [
        ("G0", 4096.0, False),
        ("G1", 4096.0, False),
    ]
    assert (listed.holder.uid, listed.holder.user, listed.holder.label) == (
        os.getuid(),
        user_name(os.getuid()),
        "train",
    )
    assert live(ledger)[0] == (listed,)
    lease.release()
    assert ledger.leases() == ()
    assert names(ledger.folder) == []


def test_an_unused_ledger_is_empty_and_stays_untouched(ledger: Ledger, tmp_path: Path) -> None:
    assert (ledger.leases(), ledger.contents().tickets) == ((), ())
    assert names(ledger.folder) == []
    assert Ledger(tmp_path / "nowhere").leases() == ()


def test_a_ticket_keeps_its_need_and_ends_with_the_lease_it_led_to(ledger: Ledger) -> None:
    need = Need(devices=2, memory=FixedMemory(4096.0), only=("G0", "G1"))
    ticket = ledger.take_ticket(ME, need, 3, hold_mutex(ledger.folder, DEADLINE_S))
    (waiting,) = ledger.contents().tickets
    assert (waiting.id, waiting.need, waiting.priority) == (ticket.id, need, 3)
    assert ledger.claim(ME, nothing, DEADLINE_S, ticket) is None
    assert live(ledger)[1] == (waiting,), "a refused request still waits"
    lease = ledger.claim(ME, take("G0"), DEADLINE_S, ticket)
    assert lease is not None
    assert ledger.contents().tickets == ()
    lease.release()


def test_a_lease_too_large_to_be_read_is_refused_with_all_others_of_its_claim(ledger: Ledger) -> None:
    with pytest.raises(EnvironmentFault, match="cannot be written: File too large"):
        ledger.claim(ME, take(*(f"G{number}" for number in range(10_000))), DEADLINE_S)
    assert names(ledger.folder) == []
    valid, too_large = take("G0")((), ()), take(*(f"G{number}" for number in range(10_000)))((), ())
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        ledger.claim_all(lambda leases, tickets: [(ME, valid), (ME, too_large)], hold_mutex(ledger.folder, DEADLINE_S))
    assert ledger.leases() == ()
    assert names(ledger.folder) == []


def test_as_many_claims_are_granted_as_there_are_descriptors(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    claims = [(ME, take(f"G{number}")((), ())) for number in range(30)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    null = os.open(os.devnull, os.O_RDONLY)
    os.close(null)
    resource.setrlimit(resource.RLIMIT_NOFILE, (null + 20, hard))
    try:
        monkeypatch.setattr(ledger_module, "first_reserved_descriptor", lambda: null + 8)
        few = ledger.claim_all(lambda *_: claims, hold_mutex(ledger.folder, DEADLINE_S))
        monkeypatch.setattr(ledger_module, "first_reserved_descriptor", lambda: 1 << 30)
        all_free = ledger.claim_all(lambda *_: claims, hold_mutex(ledger.folder, DEADLINE_S))
        with pytest.raises(EnvironmentFault, match="Too many open files"):
            ledger.claim_all(lambda *_: claims, hold_mutex(ledger.folder, DEADLINE_S))
    finally:
        for held in (*few, *all_free):
            held.release()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert 1 <= len(few) <= 8
    assert 1 <= len(all_free) <= 20
    assert [held.lease.shares[0].device_id for held in few] == [f"G{number}" for number in range(len(few))]
    assert ledger.leases() == ()


def test_a_reader_does_not_wait_for_the_holder_of_the_mutex(ledger: Ledger) -> None:
    lease = ledger.claim(ME, take("G0"), DEADLINE_S)
    assert lease is not None
    with hold_mutex(ledger.folder, DEADLINE_S):
        assert [each.id for each in ledger.leases()] == [lease.id]
    lease.release()


@as_root
def test_the_file_of_an_ended_lease_of_another_user_is_not_reused(ledger: Ledger) -> None:
    """The owner of the file is the owner of the lease."""
    (ledger.folder / "theirs.lease").write_bytes(A_RECORD)
    os.chown(ledger.folder / "theirs.lease", 4242, 4242)
    lease = ledger.claim(ME, take("G0"), DEADLINE_S)
    assert lease is not None
    assert [listed.holder.uid for listed in ledger.leases()] == [ME.uid]
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
        pytest.param(A_RECORD.replace(b'"pid": 1', b'"pid": "one"'), id="a pid that is not a number"),
        pytest.param(A_RECORD.replace(b'{"device_id": "G0"}', b""), id="no devices"),
        pytest.param(b"[]", id="a list"),
    ],
)
def test_a_malformed_file_is_neither_lease_nor_ticket_and_is_kept_while_held(ledger: Ledger, content: bytes) -> None:
    lease, ticket = ledger.folder / "x.lease", ledger.folder / "x.ticket"
    with held(lease, content), held(ticket, content):
        assert live(ledger) == ((), ())
        assert (ledger.leases(), ledger.contents().tickets) == ((), ())
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


def hold_both(connection: Connection, folder: Path) -> None:
    ledger = Ledger(folder)
    lease = ledger.claim(this_process(), take("G0"), DEADLINE_S)
    ticket = ledger.take_ticket(this_process(), Need(), 0, hold_mutex(ledger.folder, DEADLINE_S))
    assert lease is not None
    connection.send((lease.lease.id, ticket.id))
    wait_for_message(connection)


def test_devices_of_ended_holders_are_free_and_the_next_claim_removes_their_files(ledger: Ledger) -> None:
    with child(hold_both, ledger.folder) as holder:
        lease_id, ticket_id = holder.receive()
        leases, tickets = live(ledger)
        assert ([each.id for each in leases], [each.id for each in tickets]) == ([lease_id], [ticket_id])
        assert leases[0].holder.pid == holder.pid
        holder.kill()
    assert (ledger.leases(), ledger.contents().tickets) == ((), ())
    assert len(names(ledger.folder)) == 2, "a reader removes nothing"
    assert live(ledger) == ((), ())
    assert names(ledger.folder) == []


def test_a_user_can_end_their_own_lease_by_its_id(ledger: Ledger) -> None:
    lease = ledger.claim(ME, take("G0"), DEADLINE_S)
    assert lease is not None
    with pytest.raises(UserError, match="there is no lease 'nonsense'") as caught:
        ledger.end("nonsense")
    assert lease.lease.id in (caught.value.hint or "")
    ledger.end(lease.lease.id)
    assert live(ledger)[0] == ()
    lease.release()


def run_out_of_descriptors(connection: Connection, folder: Path) -> None:
    ledger = Ledger(folder)
    live(ledger)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    # One descriptor is left for the mutex, and none to read a lease with.
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 1, lowest_free + 1))
    try:
        connection.send(live(ledger))
    except EnvironmentFault as error:
        connection.send(str(error))


def test_a_process_without_descriptors_does_not_take_held_devices_for_free(ledger: Ledger) -> None:
    with child(hold_both, ledger.folder) as holder, child(run_out_of_descriptors, ledger.folder) as exhausted:
        holder.receive()
        assert "cannot be" in exhausted.receive()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted_disk(tmp_path / "disk", "size=32k,nr_inodes=8") as place:
        yield place


@as_root
def test_a_full_disk_is_reported_and_leaves_no_partial_file(small_disk: Path) -> None:
    ledger = Ledger(small_disk)
    assert live(ledger) == ((), ())
    fill(small_disk / "big")
    for attempt in (
        lambda: ledger.claim(ME, take("G0"), DEADLINE_S),
        lambda: ledger.take_ticket(ME, Need(), 0, hold_mutex(ledger.folder, DEADLINE_S)),
    ):
        with pytest.raises(EnvironmentFault, match=f"{small_disk} cannot be written: No space left") as caught:
            attempt()
        assert "free some disk space" in (caught.value.hint or "")
        assert names(small_disk) == ["big"]
    (small_disk / "big").unlink()
    lease = ledger.claim(ME, take("G0"), DEADLINE_S)
    assert lease is not None
    lease.release()


@as_root
def test_a_disk_without_free_inodes_gives_the_same_error(small_disk: Path) -> None:
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
    (share,) = record["shares"]
    unknown = dict.fromkeys(("memory_mb", "load_percent", "foreign_mb"))
    assert share == {"device_id": "G0", "is_exclusive": True, "spread_mb": 0.0, **unknown}
    assert record["holder"]["pid"] == os.getpid()
    lease.release()


def amend(ledger: Ledger, lease_id: str, *shares: Share) -> None:
    """Amend the lease under the mutex, as a claim does."""

    def decide(leases: tuple[Lease, ...], tickets: tuple[Ticket, ...]) -> None:
        ledger.amend(lease_id, Claim(shares=shares))

    ledger.claim(ME, decide, DEADLINE_S)


def test_the_record_of_an_amended_lease_may_become_shorter_or_longer(ledger: Ledger) -> None:
    lease = ledger.claim(this_process("train"), take("G0", memory_mb=4096.0), DEADLINE_S)
    assert lease is not None
    for shares in ((), tuple(Share(device_id=f"G{number}") for number in range(9)), (Share(device_id="G1"),)):
        amend(ledger, lease.lease.id, *shares)
        assert [each.shares for each in ledger.leases()] == ([shares] if shares else [])
    [listed] = ledger.leases()
    assert (listed.id, listed.holder.label) == (lease.lease.id, "train")
    lease.release()
    assert ledger.leases() == ()


def test_an_amended_lease_keeps_its_holders_and_is_removed_when_they_have_ended(ledger: Ledger) -> None:
    lease = ledger.claim(ME, take("G0"), DEADLINE_S)
    assert lease is not None
    amend(ledger, lease.lease.id)
    assert ledger.leases() == ()
    assert len(names(ledger.folder)) == 1, "the file is still there, without a holder"
    lease.leave()
    live(ledger)
    assert names(ledger.folder) == []


def test_a_malformed_or_missing_lease_cannot_be_amended(ledger: Ledger) -> None:
    live(ledger)
    amend(ledger, "missing", Share(device_id="G0"))
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
