"""Whether a queue is plainly this machine's: what is not plain is left to `queue_host`."""

from pathlib import Path

import msgspec
import pytest

from gpuyard.connect.own_queue import is_plainly_ours
from gpuyard.connect.queue_host import hold_queue


def test_a_queue_whose_daemon_ran_here_since_the_start_of_the_machine_is_ours(tmp_path: Path) -> None:
    with hold_queue(str(tmp_path)):
        pass
    assert is_plainly_ours(str(tmp_path))


@pytest.mark.parametrize("field", ["boot_id", "machine_id"])
def test_a_queue_of_another_machine_or_of_an_earlier_start_is_not_plainly_ours(tmp_path: Path, field: str) -> None:
    with hold_queue(str(tmp_path)):
        pass
    record = tmp_path / "queue.host"
    record.write_bytes(msgspec.json.encode({**msgspec.json.decode(record.read_bytes()), field: "another"}))
    assert not is_plainly_ours(str(tmp_path))


@pytest.mark.parametrize("content", ["", "{", "[]", "7", "null", '{"host": "a"}'])
def test_a_damaged_record_is_not_plainly_ours(tmp_path: Path, content: str) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "queue.host").write_text(content)
    assert not is_plainly_ours(str(tmp_path))


def test_a_folder_without_a_record_is_not_plainly_ours(tmp_path: Path) -> None:
    assert not is_plainly_ours(str(tmp_path / "missing"))
