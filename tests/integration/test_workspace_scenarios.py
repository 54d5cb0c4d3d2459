"""Scenarios of workspaces: all configs over all GPUs, selected configs on selected GPUs, several tasks per GPU, and
several workspaces at once."""

from collections import Counter
from pathlib import Path

import pytest

from gpuyard.ledger.ledger import open_ledger
from tests.integration.queue_fixture import is_gone
from tests.integration.workspace_fixture import (  # noqa: F401 - fixtures are found where they are named
    Workspace,
    Workspaces,
    gpu_of,
    make_tmux,
    make_workspace,
    make_workspaces,
    until,
)

pytestmark = [pytest.mark.needs("tmux"), pytest.mark.usefixtures("unmeasured")]


def seen_devices(ws: Workspace) -> dict[str, str]:
    """Return the value of CUDA_VISIBLE_DEVICES in each program."""
    return {each["config"]: each["env"]["CUDA_VISIBLE_DEVICES"] for each in ws.starts()}


def is_always_balanced(ws: Workspace, gpus: int) -> bool:
    """Return whether, after every start, the numbers of tasks of the GPUs differ by at most one."""
    counts = [0] * gpus
    for task in sorted(ws.tasks().values(), key=lambda task: (task["started_at"] or "~", task["id"])):
        for index in task["gpu_labels"]:
            counts[int(index)] += 1
        if max(counts) - min(counts) > 1:
            return False
    return True


def test_configs_are_spread_evenly_and_a_gpu_that_finishes_early_takes_the_next_ones(workspace: Workspace) -> None:
    configs = [f"exp{number}" for number in range(1, 7)]
    workspace.add_gated(*configs)
    assert "exp6  job 6\n" in workspace.do("start")
    workspace.until_running(*configs[:4])
    assert workspace.per_gpu() == {0: 2, 1: 2}
    assert is_always_balanced(workspace, 2)
    on_one = [config for config, task in workspace.tasks().items() if task["gpu_labels"] == ["1"]]
    workspace.let_go(*on_one)
    workspace.until_running("exp5", "exp6")
    assert workspace.per_gpu() == {0: 2, 1: 2}
    devices = seen_devices(workspace)
    assert len(set(devices.values())) == 2
    assert devices["exp5"] == devices["exp6"] == devices[on_one[0]]
    names = {config: row["session"] for config, row in workspace.rows().items()}
    assert {config: [gpu_of(name)] for config, name in names.items()} == {
        config: [int(label) for label in task["gpu_labels"]] for config, task in workspace.tasks().items()
    }
    assert set(names.values()) | {"T_scheduler"} == workspace.session_names()
    workspace.let_go(*set(configs) - set(on_one))
    assert {row["state"] for row in workspace.until_over().values()} == {"completed"}
    assert workspace.markers() == set(configs)
    assert Counter(each["config"] for each in workspace.starts()) == dict.fromkeys(configs, 1)


def test_selected_configs_run_on_their_given_gpus(workspace: Workspace) -> None:
    workspace.add_gated("heavy", "light", "test", "other")
    output = workspace.do("start", "heavy.yml,light.yml,test.yml", "1,0,0")
    assert "heavy  job 1, GPU 1\nlight  job 2, GPU 0\ntest   job 3, GPU 0\n" in output
    workspace.until_running("heavy", "light", "test")
    assert {config: task["gpu_labels"] for config, task in workspace.tasks().items()} == {
        "heavy": ["1"], "light": ["0"], "test": ["0"],
    }  # fmt: skip
    assert workspace.session_names() == {"T_heavy_gpu1", "T_light_gpu0", "T_test_gpu0", "T_scheduler"}
    assert workspace.rows()["other"]["state"] == "not started"
    # The third task of one GPU waits, though the other GPU has free memory.
    workspace.do("start", "other", "0")
    full = "limit reached: at most 2 tasks of its workspace on one GPU at a time"
    until(lambda: workspace.tasks()["other"]["reason"] == full, "its reason")
    workspace.let_go("light")
    workspace.until_running("other")
    assert workspace.tasks()["other"]["gpu_labels"] == ["0"]
    workspace.let_go("heavy", "test", "other")
    assert {row["state"] for row in workspace.until_over().values()} == {"completed"}


def test_eight_configs_run_on_two_gpus_with_four_tasks_each_and_two_wait(workspace: Workspace) -> None:
    configs = [f"exp{number:02}" for number in range(10)]
    workspace.configure(max_jobs_per_gpu=4)
    workspace.add_gated(*configs)
    workspace.do("start")
    workspace.until_running(*configs[:8])
    assert workspace.per_gpu() == {0: 4, 1: 4}
    shares = [share for lease in open_ledger().leases() for share in lease.shares]
    assert Counter(share.memory_mb for share in shares) == {24 * 1024 / 4: 8}
    status = workspace.status()
    assert (status["counts"]["running"], status["counts"]["waiting"]) == (8, 2)
    assert status["why"] == "exp08 waits: limit reached: at most 4 tasks of its workspace on one GPU at a time"
    assert "exp08 waits: limit reached: at most 4 tasks of its workspace on one GPU" in workspace.do("status")
    workspace.let_go(*configs)
    assert {row["state"] for row in workspace.until_over().values()} == {"completed"}
    assert workspace.markers() == set(configs)


@pytest.mark.full
def test_three_workspaces_with_the_same_names_do_not_interfere(workspaces: Workspaces) -> None:
    shared = str(workspaces.place / "logs of all")
    one, two, three = (workspaces.make(name, log_dir=shared, vram="3G") for name in ("one", "two", "three"))
    for number, ws in enumerate((one, two, three)):
        ws.add_gated("a", "b", seed=number)
        ws.do("start")
        ws.until_running("a", "b")
    names = [ws.session_names() for ws in (one, two, three)]
    assert len(set.union(*names)) == sum(map(len, names)) == 9
    logs = {row["log"] for ws in (one, two, three) for row in ws.rows().values()}
    assert len(logs) == 6
    assert {Path(log).parent for log in logs} == {Path(shared) / "train_logs"}

    others = [ws.program(config) for ws in (two, three) for config in ("a", "b")]
    assert one.do("kill-all") == "2 tasks ended, 3 sessions closed.\n"
    assert [row["state"] for row in one.rows().values()] == ["stopped", "stopped"]
    assert one.session_names() == set()
    assert [two.session_names(), three.session_names()] == names[1:]

    three.add_gated("c", "d", seed=2)
    assert "2 tasks finish" in two.do("stop")
    three.do("start")
    three.until_running("c", "d")
    assert not any(map(is_gone, others))

    two.let_go("a", "b")
    three.let_go("a", "b", "c", "d")
    assert {row["state"] for row in two.until_over().values()} == {"completed"}
    assert {row["state"] for row in three.until_over().values()} == {"completed"}
    assert (one.markers(), two.markers(), three.markers()) == (set(), {"a", "b"}, {"a", "b", "c", "d"})
    assert two.marker("a").read_text() == two.marker("b").read_text() != three.marker("a").read_text()
    for ws in (two, three):
        for row in ws.rows().values():
            assert "epoch 2: loss" in Path(row["log"]).read_text()
