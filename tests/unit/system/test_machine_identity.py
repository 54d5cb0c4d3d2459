"""Whether a record was made on this machine: by machine id, boot id and host name."""

import pytest

from gpuyard.system import processes as machine_identity
from gpuyard.system.processes import is_this_machine, machine_id, machine_name

ID, OTHER_ID = "1" * 12, "2" * 12
BOOT, OTHER_BOOT = "boot-1", "boot-2"


def be(monkeypatch: pytest.MonkeyPatch, own_id: str | None, boot: str | None, host: str = "alpha") -> None:
    monkeypatch.setattr(machine_identity, "machine_id", lambda: own_id)
    monkeypatch.setattr(machine_identity, "boot_id", lambda: boot)
    monkeypatch.setattr(machine_identity, "host_name", lambda: host)


@pytest.mark.parametrize(
    ("record", "is_same"),
    [
        pytest.param((ID, BOOT, "alpha"), True, id="the same start"),
        pytest.param((ID, OTHER_BOOT, "alpha"), True, id="restarted"),
        pytest.param((ID, OTHER_BOOT, "bravo"), False, id="cloned with its id"),
        pytest.param((ID, BOOT, "renamed"), True, id="renamed while it ran"),
        pytest.param((OTHER_ID, BOOT, "alpha"), False, id="another system on the same kernel"),
        pytest.param((OTHER_ID, OTHER_BOOT, "alpha"), False, id="another machine of the same name"),
        pytest.param((None, BOOT, "c0ffee"), True, id="a container without an id, on this machine"),
        pytest.param((None, OTHER_BOOT, "c0ffee"), False, id="a container without an id, elsewhere"),
    ],
)
def test_a_record_tells_ours(
    monkeypatch: pytest.MonkeyPatch, record: tuple[str | None, str, str], is_same: bool
) -> None:
    be(monkeypatch, ID, BOOT)
    assert is_this_machine(*record) is is_same


def test_a_container_made_anew_keeps_its_queue_until_a_restart_and_no_id_means_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    be(monkeypatch, None, BOOT, "c0ffee")
    assert is_this_machine(None, BOOT, "badcafe")
    assert not is_this_machine(None, OTHER_BOOT, "badcafe")
    be(monkeypatch, None, None)
    assert is_this_machine(None, None, "bravo")


@pytest.mark.parametrize("content", [None, "uninitialized", "0" * 31, "x" * 32])
def test_a_machine_id_that_is_none_does_not_count(monkeypatch: pytest.MonkeyPatch, content: str | None) -> None:
    monkeypatch.setattr(machine_identity, "_read", lambda _: content)
    assert machine_id() is None


def test_the_machine_id_itself_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_identity, "_read", lambda _: "a" * 32)
    found = machine_id()
    assert found is not None
    assert "aaaa" not in found + machine_name()
