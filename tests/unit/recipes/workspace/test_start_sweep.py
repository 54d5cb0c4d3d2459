"""Starting a workspace submits each config that is neither completed nor active, once."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
from msgspec.structs import replace

from gpuyard.config import state_dir
from gpuyard.errors import UserError
from gpuyard.recipes.workspace import sweep
from gpuyard.recipes.workspace.settings import LoadedSettings, load
from gpuyard.recipes.workspace.sweep import StartedSweep

Start = Callable[..., tuple[list[str], StartedSweep]]


class Queue:
    """A daemon with these tasks that records submissions and refuses some of them."""

    def __init__(self, tasks: list[dict[str, Any]], refuses: str = "") -> None:
        self.submitted: list[dict[str, Any]] = []
        self._tasks, self._refuses = tasks, refuses

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def request(self, method: str, path: str, *_: object, body: Any = None, **__: object) -> dict[str, Any]:
        if path == "/tasks":
            return {"tasks": self._tasks}
        if path == "/submissions":
            if body["options"]["name"] == self._refuses:
                raise UserError("there is no usable GPU")
            self.submitted.append(body)
            return {"first": 100 + len(self.submitted)}
        assert (method, path) == ("POST", "/tags/go")
        return {}


def task(config: str, state: str) -> dict[str, Any]:
    is_live, is_finished = state == "running", state in ("succeeded", "failed")
    return {"config": config, "id": 7, "attempt": 1, "state": state, "is_live": is_live, "is_finished": is_finished}


@pytest.fixture
def workspace(tmp_path: Path) -> LoadedSettings:
    folder = tmp_path / "w"
    (folder / "configs").mkdir(parents=True)
    (folder / "train.py").write_text("")
    settings = f"task_name: w\npython_env: {sys.executable}\nlog_dir: logs\nsessions: none\nmax_jobs_per_gpu: 3\n"
    (folder / "scheduler_config.yml").write_text(settings)
    for name in ("a", "b"):
        (folder / "configs" / f"{name}.yml").write_text("")
    return load(folder)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    def begin(workspace: LoadedSettings, queue: Queue, *, is_rerun: bool = False) -> tuple[list[str], StartedSweep]:
        monkeypatch.setattr(sweep, "connect", lambda **_: queue)
        state_dir().mkdir(mode=0o700, exist_ok=True)
        started = sweep.start(workspace, [], None, is_rerun=is_rerun)
        return [each.config for each in started.submitted], started

    return begin


def mark(workspace: LoadedSettings, config: str) -> Path:
    marker = Path(workspace.settings.output_dir) / f"{config}_completed.txt"
    marker.parent.mkdir(exist_ok=True)
    marker.write_text("done\n")
    return marker


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ("running", "already running as job 7"),
        ("queued", "already waiting as job 7"),
        ("delayed", "already waiting as job 7"),
        ("held", "already waiting as job 7"),
    ],
)
@pytest.mark.parametrize("is_rerun", [False, True])
def test_an_active_task_is_not_submitted_again(
    workspace: LoadedSettings, start: Start, state: str, why: str, is_rerun: bool
) -> None:
    submitted, started = start(workspace, Queue([task("a", state)]), is_rerun=is_rerun)
    assert submitted == ["b"]
    assert started.skipped == [("a", why)]


def test_a_rerun_is_for_completed_tasks_and_keeps_the_marker_if_it_is_refused(
    workspace: LoadedSettings, start: Start
) -> None:
    marker = mark(workspace, "b")
    assert start(workspace, Queue([task("a", "failed")]))[0] == ["a"]
    assert marker.exists()
    assert start(workspace, Queue([task("b", "succeeded")]), is_rerun=True)[0] == ["a", "b"]
    assert not marker.exists()
    marker = mark(workspace, "b")
    submitted, started = start(workspace, Queue([], refuses="b"), is_rerun=True)
    assert submitted == ["a"]
    assert started.refused == [("b", "there is no usable GPU")]
    assert marker.exists()


def test_all_tasks_of_a_workspace_share_gpus_as_configured(workspace: LoadedSettings, start: Start) -> None:
    queue = Queue([])
    start(workspace, queue)
    assert [each["tag_sharing"]["most_per_device"] for each in queue.submitted] == [3, 3]
    assert len({each["options"]["tag"] for each in queue.submitted}) == 1
    assert len({each["token"] for each in queue.submitted}) == 2


def test_with_gpu_count_0_tasks_get_no_gpu_unless_their_config_asks_for_one(
    workspace: LoadedSettings, start: Start
) -> None:
    (workspace.workspace / "configs/b.yml").write_text("scheduler: {gpus: 1}\n")
    queue = Queue([])
    start(replace(workspace, settings=replace(workspace.settings, gpu_count=0, vram=1.0)), queue)
    assert [each["options"].get("gpus") for each in queue.submitted] == [0, 1]
    assert ["vram" in each["options"] for each in queue.submitted] == [False, True]


def test_each_submitted_config_is_reported_with_its_log(
    workspace: LoadedSettings, tmp_path: Path, start: Start
) -> None:
    shared = tmp_path / "shared"
    (shared / "train_logs").mkdir(parents=True)
    (shared / "train_logs/a.log").write_text("# log of the workspace other-123456: /other\n")
    loaded = replace(workspace, settings=replace(workspace.settings, log_dir=str(shared)))
    _, started = start(loaded, Queue([]))
    tag = started.tag
    assert [each.log for each in started.submitted] == [
        f"{shared}/train_logs/{tag}_a.log", f"{shared}/train_logs/b.log",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "name"), [("exp1.yml", "exp1"), ("exp.1.yaml", "exp.1"), ("plain", "plain"), ("-x $(y).yml", "-x $(y)")]
)
def test_a_config_is_named_after_its_file_without_the_suffix(
    workspace: LoadedSettings, start: Start, file: str, name: str
) -> None:
    (workspace.workspace / "configs" / file).write_text("")
    queue = Queue([])
    loaded = replace(workspace, settings=replace(workspace.settings, config_pattern=file))
    assert start(loaded, queue)[0] == [name]
    assert queue.submitted[0]["environment"]["GPUYARD_CONFIG_NAME"] == name
