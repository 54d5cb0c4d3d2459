"""`gpuyard render` on the command line: it renders the outputs of a manifest and reports what it cannot render."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes.queue_command import GPUYARD, run
from tests.integration.conftest import Script
from tests.integration.queue_fixture import until
from tests.integration.render_fixture import (
    ALL,
    BUDGETS,
    DEADLINE_S,
    LABELS,
    await_begun,
    closed_gate,
    entries,
    folder,  # noqa: F401 - a fixture is found where it is named
    outputs,
    render,
    rendered,
    rendering,
    skipped,
    write_manifest,
)
from tests.integration.terminal import Terminal
from tests.residency_files import points, splats, write_ply

pytestmark = pytest.mark.usefixtures("folder")


# From a manifest to outputs


def test_every_label_is_rendered_with_its_scene_frames_and_keys() -> None:
    result = render()
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0].startswith("24 of 24 labels rendered, in ")
    assert rendered() == ALL
    assert skipped() == []
    image = json.loads(outputs()["0-1-3/image.json"])
    assert image["label"] == {"name": "0-1-3", "camera": 3, "fov": 60}
    expected = [points(4000, 10 + frame)["x"].astype("f8").sum() for frame in range(3)]
    assert [frame[0] for frame in image["sums"][1:]] == pytest.approx(expected)


def test_the_json_answer_counts_rendered_and_skipped_labels() -> None:
    write_manifest(Path("manifest.jsonl"), entries()[0], "oops\n", {**entries()[1], "scene": "none.ply"})
    result = render("render", "--json")
    answer = json.loads(result.stdout)
    assert result.returncode == 1
    assert (answer["status"]["state"], answer["status"]["rendered"], answer["status"]["skipped"]) == ("finished", 4, 4)
    assert {skip["label"] for skip in answer["skipped"]} == {f"0-1-{camera}" for camera in range(LABELS)}
    assert [bad["place"] for bad in answer["bad"]] == ["line 2"]
    assert answer["out"] == str(Path("out").absolute())


def test_an_option_keeps_the_order_of_the_manifest() -> None:
    mixed = entries()[::2] + entries()[1::2]
    write_manifest(Path("manifest.jsonl"), *mixed)
    assert render("recording_order", "--order", "manifest", "--workers", "1").returncode == 0
    order = [label["name"] for entry in mixed for label in entry["labels"]]
    assert Path("order").read_text().split() == order


def test_a_custom_loader_reads_other_formats_than_ply(folder: Path) -> None:  # noqa: F811 - the fixture
    np.savez(folder / "room.npz", x=np.arange(5.0), colour=np.ones((5, 3), "u1"))
    write_manifest(folder / "manifest.jsonl", {"scene": "room.npz", "name": "a"})
    assert render("render", "--loader", "renderers:load").returncode == 0
    assert json.loads(outputs()["a/image.json"])["sums"] == [[10.0, 15.0]]


def test_existing_outputs_are_never_replaced() -> None:
    assert render().returncode == 0
    before = outputs()
    again = render()
    assert again.returncode == 2
    assert "already exists" in again.stderr
    assert "--resume" in again.stderr
    resumed = render("render", "--resume")
    assert resumed.returncode == 0
    assert resumed.stdout.startswith("0 of 24 labels rendered, 24 existed already")
    assert outputs() == before


# What cannot be rendered


def test_the_first_20_bad_lines_are_listed_and_the_rest_is_counted() -> None:
    write_manifest(Path("manifest.jsonl"), entries()[0], *["oops\n"] * 25)
    messages = render().stderr.splitlines()
    assert [line.partition(":")[2].partition(":")[0] for line in messages[:2]] == [
        " manifest.jsonl, line 2",
        " manifest.jsonl, line 3",
    ]
    assert messages[20] == "gpuyard: and 5 more; --strict lists them all"


def test_strict_lists_all_errors_and_renders_nothing() -> None:
    write_manifest(Path("manifest.jsonl"), entries()[0], "{oops\n", "[]\n")
    result = render("render", "--strict")
    assert result.returncode == 2
    assert "line 2: it is not JSON" in result.stderr
    assert "line 3: an entry is an object, not a list" in result.stderr
    assert not Path("out").exists()


@pytest.mark.parametrize("content", ["", "oops"])
def test_an_empty_manifest_is_an_error(content: str) -> None:
    Path("manifest.jsonl").write_text(content)
    result = render()
    assert (result.returncode, "nothing to render" in result.stderr) == (2, True)


def test_a_truncated_file_skips_only_its_own_labels() -> None:
    whole = Path("scenes/room1.ply").read_bytes()
    Path("scenes/room1.ply").write_bytes(whole[: len(whole) // 2])
    result = render()
    assert result.returncode == 1
    assert rendered() == {name for name in ALL if not name.startswith("1-")}
    assert {skip["label"] for skip in skipped()} == ALL - rendered()
    assert {(skip["kind"], "room1.ply" in skip["reason"]) for skip in skipped()} == {("asset", True)}
    assert "8: a scene or an actor cannot be read" in result.stdout


def test_labels_that_fail_are_skipped_with_a_traceback_and_rendered_by_the_next_run() -> None:
    result = render("failing")
    assert result.returncode == 1
    assert {skip["label"] for skip in skipped()} == {name for name in ALL if name.endswith("-1")}
    assert all("ValueError: no such camera" in skip["reason"] for skip in skipped())
    assert all("renderers.py" in skip["traceback"] for skip in skipped())
    assert rendered() == {name for name in ALL if not name.endswith("-1")}
    assert render("render", "--resume").returncode == 0
    assert (rendered(), skipped()) == (ALL, [])


def test_a_scene_larger_than_the_budget_is_skipped_with_its_size() -> None:
    write_ply("scenes/room2.ply", splats(9000))
    assert render().returncode == 1
    assert rendered() == {name for name in ALL if not name.startswith("2-")}
    assert {skip["label"] for skip in skipped()} == ALL - rendered()
    assert {(skip["kind"], skip["sizes"]["scene"]) for skip in skipped()} == {("too-large", 9000 * 62 * 4)}


# Arguments


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["manifest.jsonl"], "--renderer"),
        (["manifest.jsonl", "--renderer", "renderers:nothing"], "'renderers' has no 'nothing'"),
        (["manifest.jsonl", "--renderer", "renderers:load"], "is called as load(scene, frames, label, out_dir)"),
        (["manifest.jsonl", "--renderer", "renderers:render", "--loader", "nowhere:f"], "there is no module 'nowhere'"),
        (["none.json", "--renderer", "renderers:render"], "there is no manifest none.json"),
        (["manifest.jsonl", "--renderer", "renderers:render", "--vram-budget", "0"], "--vram-budget 0 is out of range"),
        (["manifest.jsonl", "--renderer", "renderers:render", "--ram-budget", "9" * 400], "is out of range"),
        (
            ["manifest.jsonl", "--renderer", "renderers:render", "--out", "manifest.jsonl"],
            "there is a file of that name",
        ),
        (["manifest.jsonl", "--renderer", "renderers:render", "--status", "none/x.json"], "there is no folder"),
        (["manifest.jsonl", "--renderer", "renderers:render", "--workers", "0"], "--workers"),
    ],
)
def test_invalid_arguments_are_reported_before_anything_is_rendered(arguments: list[str], says: str) -> None:
    result = run("render", *arguments)
    assert (result.returncode, says in result.stderr) == (2, True), result.stderr
    assert not Path("out").is_dir() or rendered() == set()


def test_default_budgets_are_printed() -> None:
    result = run("render", "manifest.jsonl", "--renderer", "renderers:render", "--device", "host")
    assert result.returncode == 0
    assert "a quarter of the available RAM" in result.stderr
    assert "half of the available RAM" in result.stderr


def test_a_budget_for_actors_streams_those_that_do_not_fit_and_refuses_those_that_never_do() -> None:
    free = json.loads(render("render", "--json").stdout)
    bounded = json.loads(render("render", "--json", "--out", "bounded", "--actor-budget", "0.15M").stdout)
    assert (free["status"]["counts"]["streams"], bounded["status"]["counts"]["streams"] > 0) == (0, True)
    assert outputs("bounded") == outputs()
    refused = json.loads(render("render", "--json", "--out", "refused", "--actor-budget", "0.05M").stdout)
    assert {skip["reason"].partition(": ")[2] for skip in refused["skipped"]} == {
        "two of its frames are larger than the VRAM budget for actors"
    }


def test_a_manifest_may_be_called_profile() -> None:
    Path("profile").write_text(json.dumps(entries()))
    assert render(manifest="./profile").returncode == 0


def test_the_command_does_not_import_numpy() -> None:
    program = "import sys, gpuyard.ui.cli.recipes.render; print('numpy' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=True)
    assert result.stdout == "False\n"


# During a run


def test_the_status_file_is_always_complete_and_lists_the_workers() -> None:
    statuses: list[Any] = []

    def has_three() -> bool:
        if Path("status.json").exists():
            statuses.append(json.loads(Path("status.json").read_text()))
        return len({status["now"] for status in statuses}) >= 3

    with closed_gate() as open_gate, rendering("gated", "--status", "status.json") as process:
        begun = await_begun(2)
        until(has_three, "three statuses")
        open_gate()
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, errors
    workers = statuses[-1]["workers"]
    assert {worker["label"] for worker in workers if worker["doing"] == "rendering"} == begun
    assert (statuses[-1]["state"], statuses[-1]["labels"], statuses[-1]["rendered"]) == ("running", 24, 0)
    vram = statuses[-1]["vram"]
    assert 0 < vram["assets"] <= vram["budget"] == 2 << 20
    assert vram["left"] == vram["budget"] - max(vram["assets"], vram["allocator"])
    references = {each["path"]: (each["workers"], each["units"]) for each in statuses[-1]["references"]}
    for worker in workers:
        for kind in ("scene", "actor"):
            assert references[worker[kind]][0] == sum(each[kind] == worker[kind] for each in workers)
    assert sum(units for _, units in references.values()) > 0
    last = json.loads(Path("status.json").read_text())
    assert (last["state"], last["rendered"], last["left_s"], last["references"]) == ("finished", 24, 0, [])


LONG = """
from gpuyard.recipes.render import status_file as following
from gpuyard.ui.cli import main
following.DEFAULT_AFTER_S = 0.001
main()
"""


def test_a_run_writes_a_status_file_to_its_outputs_that_lists_the_assets_in_memory() -> None:
    write_manifest(Path("manifest.jsonl"), *entries(), {"scene": "scenes/room0.ply", "name": "status.json"})
    command = ["render", "manifest.jsonl", "--renderer", "renderers:gated", *BUDGETS]
    process = subprocess.Popen([sys.executable, "-c", LONG, *command], stderr=subprocess.PIPE, text=True)
    with closed_gate() as open_gate, process:
        await_begun(2)
        until(Path("out/status.json").exists, "a status")
        until(lambda: json.loads(Path("out/status.json").read_text())["scenes_in_ram"], "scenes in RAM")
        status = json.loads(Path("out/status.json").read_text())
        open_gate()
        assert process.wait(DEADLINE_S) == 0
    there = {str(path.absolute()) for path in (*Path("scenes").iterdir(), *Path("actors").iterdir())}
    assert status["scenes"]
    assert {*status["scenes"], *status["scenes_in_ram"], *status["actors"], *status["actors_in_ram"]} <= there
    assert json.loads(Path("out/status.json").read_text())["state"] == "finished"
    assert rendered() == {*ALL, "%73tatus.json"}


def test_a_directory_at_the_path_of_the_status_file_does_not_stop_the_run() -> None:
    Path("out/status.json").mkdir(parents=True)
    result = render()
    assert result.returncode == 0
    assert "no status is written: " in result.stderr
    assert "--status names another file" in result.stderr


def test_a_status_file_may_be_among_the_outputs() -> None:
    assert render("render", "--status", "out/status.json").returncode == 0
    assert json.loads(Path("out/status.json").read_text())["rendered"] == 24
    assert render("render", "--status", "out/status.json", "--resume").returncode == 0


def test_a_terminal_shows_the_progress() -> None:
    command = [*GPUYARD, "render", "manifest.jsonl", "--renderer", "renderers:gated", *BUDGETS]
    with closed_gate() as open_gate:
        terminal = Terminal(command, {"COLUMNS": "100"})
        try:
            await_begun(2)
            terminal.read_until("0 of 24 labels")
            terminal.read_until("scene slots in use")
            open_gate()
            status, output = terminal.end()
        finally:
            terminal.close()
    assert status == 0
    assert "24 of 24 labels rendered" in output


@pytest.mark.usefixtures("unmeasured")  # an interrupt under the coverage tracer can hang the process
def test_ctrl_c_finishes_the_labels_in_progress() -> None:
    with closed_gate() as open_gate, rendering("gated", "--status", "status.json") as process:
        assert process.stderr is not None
        begun = await_begun(2)
        process.send_signal(signal.SIGINT)
        assert "again to stop at once" in process.stderr.readline()
        assert process.poll() is None
        open_gate()
        output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert rendered() == begun
    assert output.startswith("2 of 24 labels rendered, 22 left")
    assert "--resume" in errors
    assert json.loads(Path("status.json").read_text())["state"] == "interrupted"
    assert render("render", "--resume").returncode == 0
    assert rendered() == ALL


def test_sigterm_ends_it_like_ctrl_c() -> None:
    with closed_gate() as open_gate, rendering("gated") as process:
        assert process.stderr is not None
        begun = await_begun(2)
        process.send_signal(signal.SIGTERM)
        process.stderr.readline()
        open_gate()
        process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, rendered()) == (143, begun)


# Beside other work


def test_its_vram_budget_is_a_lease_that_others_wait_for(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUYARD_SIMULATE", "1x1GB")
    holder = script(vram="800M")
    assert holder.stdout is not None
    holder.stdout.readline()
    with rendering("gated", "--vram-budget", "500M") as process:
        assert process.stderr is not None
        assert "waiting for 500 MB of VRAM on one device" in process.stderr.readline()
        with closed_gate():
            holder.communicate("\n", timeout=DEADLINE_S)
            await_begun(1)
            leases = json.loads(run("leases", "--json").stdout)["leases"]
        process.communicate(timeout=DEADLINE_S)
    assert [(lease["pid"], lease["shares"][0]["reserved_mb"]) for lease in leases] == [(process.pid, 500)]
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("function", "manifest", "reason"),
    [
        ("failing", "manifest.jsonl", "6 of 24 labels skipped: ValueError: no such camera (exit status 1)"),
        ("render", "gone.jsonl", "1 of 1 labels skipped: {folder}/gone.ply: there is no such file (exit status 1)"),
        ("render", "half.jsonl", "half.jsonl, line 2: it is not JSON"),
        ("rendr", "manifest.jsonl", "exit status 2: --renderer: 'renderers' has no 'rendr'"),
    ],
)
@pytest.mark.usefixtures("home")
def test_a_failed_job_has_the_error_as_its_reason(function: str, manifest: str, reason: str) -> None:
    write_manifest(Path("gone.jsonl"), {"scene": "gone.ply", "name": "a"})
    write_manifest(Path("half.jsonl"), entries()[0], "{oops\n")
    render_it = ("render", manifest, "--renderer", f"renderers:{function}", *BUDGETS)
    assert run("submit", "--vram", "1G", "--", *GPUYARD, *render_it).returncode == 0
    assert run("wait").returncode == 5
    answer = json.loads(run("show", "1", "--json").stdout)
    assert reason.format(folder=Path.cwd()) in answer["reason"]
