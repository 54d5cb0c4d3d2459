"""`gpuyard restore` looks for unfinished jobs again once no daemon can accept more."""

from contextlib import closing
from pathlib import Path

import pytest

from gpuyard.errors import UserError
from gpuyard.store.backup import back_up, count_unfinished
from gpuyard.ui.cli.command_grammar import Typed
from gpuyard.ui.cli.service import backup
from tests.unit.store import QueueDb


def test_a_job_accepted_meanwhile_is_not_replaced(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = own_home / "queue.db", list[str]()
    own_home.mkdir(mode=0o700, exist_ok=True)
    with closing(QueueDb(path).db):
        back_up(path, tmp_path / "backup")

    def stop_daemon() -> None:
        queue_db = QueueDb(path)
        queue_db.add()
        queue_db.db.close()

    monkeypatch.setattr(backup, "_stop_daemon", stop_daemon)
    monkeypatch.setattr(backup, "request", lambda _, route: asked.append(route))
    with pytest.raises(UserError, match="have not finished: 1 queued"):
        backup.COMMANDS["restore"].run(Typed({}, [str(tmp_path / "backup")]))
    assert count_unfinished(path) == {"queued": 1}
    assert asked == ["/status"], "the daemon is started again"
