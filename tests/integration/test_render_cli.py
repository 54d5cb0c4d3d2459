"""`gpuyard render` and `gpuyard render profile`: outputs of a manifest, reports, status, and recommended budgets."""

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuyard.ui.cli.recipes.render import PROFILE
from tests.fakes.queue_command import GPUYARD, run, run_here
from tests.integration.conftest import Script
from tests.integration.queue_fixture import until
from tests.integration.render_fixture import (
    ALL,
    BUDGETS,
    DEADLINE_S,
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
RENDER = ("render", "manifest.jsonl", "--renderer", "renderers:render")

# From a manifest to outputs


def test_every_label_is_rendered_with_its_scene_frames_and_keys_and_never_replaced() -> None:
    result = run(*RENDER, "--device", "host")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0].startswith("24 of 24 labels rendered, in ")
    assert "a quarter of the available RAM" in result.stderr
    assert "half of the available RAM" in result.stderr
    assert (rendered(), skipped()) == (ALL, [])
    before = outputs()
    image = json.loads(before["0-1-3/image.json"])
    assert image["label"] == {"name": "0-1-3", "camera": 3, "fov": 60}
    expected = [points(4000, 10 + frame)["x"].astype("f8").sum() for frame in range(3)]
    assert [frame[0] for frame in image["sums"][1:]] == pytest.approx(expected)
    again = render()
    assert (again.returncode, "already exists" in again.stderr, "--resume" in again.stderr) == (2, True, True)
    resumed = render("render", "--resume")
    assert resumed.returncode == 0
    assert resumed.stdout.startswith("0 of 24 labels rendered, 24 existed already")
    assert outputs() == before


def test_a_custom_loader_reads_other_formats_than_ply_and_an_option_keeps_the_order(folder: Path) -> None:  # noqa: F811
    for name in "ab":
        np.savez(folder / f"{name}.npz", x=np.arange(5.0), colour=np.ones((5, 3), "u1"))
    manifest = [{"scene": f"{name[0]}.npz", "actor": actor, "name": name}
                for name, actor in (("a1", None), ("b1", None), ("a2", "b.npz"), ("b2", "b.npz"))]  # fmt: skip
    write_manifest(folder / "manifest.jsonl", *manifest)
    options = ("--loader", "renderers:load", "--order", "manifest", "--workers", "1")
    assert render("recording_order", *options).returncode == 0
    assert json.loads(outputs()["a1/image.json"])["sums"] == [[10.0, 15.0]]
    assert Path("order").read_text().split() == ["a1", "b1", "a2", "b2"]


# What cannot be rendered


def test_assets_and_labels_that_fail_are_skipped_and_the_next_run_renders_them() -> None:
    whole = Path("scenes/room1.ply").read_bytes()
    Path("scenes/room1.ply").write_bytes(whole[: len(whole) // 2])
    write_ply("scenes/room2.ply", splats(9000))
    write_manifest(Path("manifest.jsonl"), *entries(), "oops\n")
    result = render("failing", "--json")
    answer = json.loads(result.stdout)
    assert result.returncode == 1
    assert [answer["status"][name] for name in ("state", "rendered", "skipped")] == ["finished", 6, 18]
    assert [bad["place"] for bad in answer["bad"]] == ["line 7"]
    assert answer["out"] == str(Path("out").absolute())
    skips = {skip["label"]: skip for skip in skipped()}
    assert {skip["label"] for skip in answer["skipped"]} == skips.keys() == ALL - rendered()
    assert {name: skip["kind"] for name, skip in skips.items()} == {
        name: {"0": "renderer", "1": "asset", "2": "too-large"}[name[0]]
        for name in ALL
        if name[0] != "0" or name.endswith("-1")
    }
    assert "room1.ply" in skips["1-0-0"]["reason"]
    assert skips["2-0-0"]["sizes"]["scene"] == 9000 * 62 * 4
    assert "ValueError: no such camera" in skips["0-0-1"]["reason"]
    assert "renderers.py" in skips["0-0-1"]["traceback"]
    Path("scenes/room1.ply").write_bytes(whole)
    write_ply("scenes/room2.ply", splats(1500))
    assert render("render", "--resume").returncode == 1, "a line is bad still"
    assert (rendered(), skipped()) == (ALL, [])


def test_the_first_20_bad_lines_are_listed_and_strict_lists_all_and_renders_nothing() -> None:
    write_manifest(Path("profile"), entries()[0], *["oops\n"] * 24, "[]\n")
    strict = render("render", "--strict", manifest="./profile")
    assert strict.returncode == 2
    assert "line 2: it is not JSON" in strict.stderr
    assert "line 26: an entry is an object, not a list" in strict.stderr
    assert not Path("out").exists()
    messages = render(manifest="./profile").stderr.splitlines()
    assert [line.partition(":")[2].partition(":")[0] for line in messages[:2]] == [
        f" ./profile, line {n}" for n in (2, 3)
    ]
    assert messages[20] == "gpuyard: and 5 more; --strict lists them all"
    assert rendered() == {label["name"] for label in entries()[0]["labels"]}


# Arguments


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["manifest.jsonl"], "--renderer"),
        (["manifest.jsonl", "--renderer", "renderers:nothing"], "'renderers' has no 'nothing'"),
        (["empty.jsonl", "--renderer", "renderers:render"], "nothing to render"),
        ([*RENDER[1:], "--loader", "nowhere:f"], "there is no module 'nowhere'"),
        ([*RENDER[1:], "--vram-budget", "0"], "--vram-budget 0 is out of range"),
        ([*RENDER[1:], "--ram-budget", "9" * 400], "is out of range"),
        ([*RENDER[1:], "--out", "manifest.jsonl"], "there is a file of that name"),
        ([*RENDER[1:], "--status", "none/x.json"], "there is no folder"),
        ([*RENDER[1:], "--workers", "0"], "--workers"),
    ],
)
def test_invalid_arguments_are_reported_before_anything_is_rendered(arguments: list[str], says: str) -> None:
    Path("empty.jsonl").touch()
    result = run("render", *arguments)
    assert (result.returncode, says in result.stderr) == (2, True), result.stderr
    assert not Path("out").is_dir() or rendered() == set()


def test_a_budget_for_actors_streams_those_that_do_not_fit_and_refuses_those_that_never_do() -> None:
    bounded = json.loads(render("render", "--json", "--actor-budget", "0.15M").stdout)
    assert bounded["status"]["counts"]["streams"] > 0
    assert rendered() == ALL
    refused = json.loads(render("render", "--json", "--out", "refused", "--actor-budget", "0.05M").stdout)
    assert {skip["reason"].partition(": ")[2] for skip in refused["skipped"]} == {
        "two of its frames are larger than the VRAM budget for actors"
    }


def test_the_command_does_not_import_numpy() -> None:
    program = "import sys, gpuyard.ui.cli.recipes.render; print('numpy' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=True)
    assert result.stdout == "False\n"


# During a run

LONG = """
from gpuyard.recipes.render import status_file as following
from gpuyard.ui.cli import main
following.DEFAULT_AFTER_S = 0.001
main()
"""


def test_the_status_among_the_outputs_is_always_complete_and_lists_workers_and_assets() -> None:
    write_manifest(Path("manifest.jsonl"), *entries(), {"scene": "scenes/room0.ply", "name": "status.json"})
    path, statuses = Path("out/status.json"), list[Any]()

    def has_three() -> bool:
        if path.exists():
            statuses.append(json.loads(path.read_text()))
        return len({status["now"] for status in statuses}) >= 3 and bool(statuses[-1]["scenes_in_ram"])

    command = [sys.executable, "-c", LONG, *RENDER[:3], "renderers:gated", *BUDGETS]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    with closed_gate() as open_gate, process:
        begun = await_begun(2)
        until(has_three, "three statuses, and scenes in RAM")
        open_gate()
        assert process.wait(DEADLINE_S) == 0
    now = statuses[-1]
    assert {worker["label"] for worker in now["workers"] if worker["doing"] == "rendering"} == begun
    assert (now["state"], now["labels"], now["rendered"]) == ("running", 25, 0)
    vram = now["vram"]
    assert 0 < vram["assets"] <= vram["budget"] == 2 << 20
    assert vram["left"] == vram["budget"] - max(vram["assets"], vram["allocator"])
    references = {each["path"]: (each["workers"], each["units"]) for each in now["references"]}
    for worker in now["workers"]:
        for kind in ("scene", "actor"):
            assert references[worker[kind]][0] == sum(each[kind] == worker[kind] for each in now["workers"])
    assert sum(units for _, units in references.values()) > 0
    there = {str(each.absolute()) for each in (*Path("scenes").iterdir(), *Path("actors").iterdir())}
    assert now["scenes"]
    assert {*now["scenes"], *now["scenes_in_ram"], *now["actors"], *now["actors_in_ram"]} <= there
    last = json.loads(path.read_text())
    assert (last["state"], last["rendered"], last["left_s"], last["references"]) == ("finished", 25, 0, [])
    assert rendered() == {*ALL, "%73tatus.json"}


def test_a_directory_at_the_path_of_the_status_file_does_not_stop_the_run() -> None:
    Path("out/status.json").mkdir(parents=True)
    result = render()
    assert result.returncode == 0
    assert "no status is written: " in result.stderr
    assert "--status names another file" in result.stderr


def test_a_terminal_shows_the_progress() -> None:
    command = [*GPUYARD, *RENDER[:3], "renderers:gated", *BUDGETS]
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
    assert (status, "24 of 24 labels rendered" in output) == (0, True)


@pytest.mark.usefixtures("unmeasured")  # an interrupt under the coverage tracer can hang the process
def test_ctrl_c_finishes_the_labels_in_progress() -> None:
    status = ("--status", "out/status.json")
    with closed_gate() as open_gate, rendering("gated", *status) as process:
        assert process.stderr is not None
        begun = await_begun(2)
        process.send_signal(signal.SIGINT)
        assert "again to stop at once" in process.stderr.readline()
        assert process.poll() is None
        open_gate()
        output, errors = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, rendered()) == (130, begun)
    assert output.startswith("2 of 24 labels rendered, 22 left")
    assert "--resume" in errors
    assert json.loads(Path("out/status.json").read_text())["state"] == "interrupted"
    assert render("render", *status, "--resume").returncode == 0
    assert rendered() == ALL


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


@pytest.mark.usefixtures("home")
def test_a_failed_job_has_the_error_as_its_reason() -> None:
    write_manifest(Path("gone.jsonl"), {"scene": "gone.ply", "name": "a"})
    write_manifest(Path("half.jsonl"), entries()[0], "{oops\n")
    reasons = {
        ("failing", "manifest"): "6 of 24 labels skipped: ValueError: no such camera (exit status 1)",
        ("render", "gone"): f"1 of 1 labels skipped: {Path.cwd()}/gone.ply: there is no such file (exit status 1)",
        ("render", "half"): "half.jsonl, line 2: it is not JSON",
        ("rendr", "manifest"): "exit status 2: --renderer: 'renderers' has no 'rendr'",
    }
    for number, (function, manifest) in enumerate(reasons):
        render_it = ("render", f"{manifest}.jsonl", "--renderer", f"renderers:{function}", "--out", str(number))
        assert run("submit", "--vram", "1G", "--", *GPUYARD, *render_it, *BUDGETS).returncode == 0
    assert run("wait").returncode == 5
    for number, reason in enumerate(reasons.values(), 1):
        assert reason in json.loads(run_here("show", str(number), "--json").stdout)["reason"]


# Profiles


def test_every_asset_is_measured_in_each_tier_and_the_least_recommended_budgets_suffice() -> None:
    result = run("render", "profile", "manifest.jsonl", "--device", "host", "--json")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assets = {asset["path"].rpartition("/")[2]: asset for asset in answer["assets"]}
    assert list(assets) == ["room0.ply", "room1.ply", "room2.ply", "walk0", "walk1"]
    room, walk = assets["room1.ply"], assets["walk1"]
    assert (room["kind"], room["frames"], room["labels"], room["vram_nbytes"]) == ("scene", 1, 8, 1500 * 62 * 4)
    assert (walk["kind"], walk["frames"], walk["labels"], walk["frame_nbytes"]) == ("actor", 3, 12, 4000 * 15)
    assert walk["disk_nbytes"] == sum(path.stat().st_size for path in Path("actors/walk1").iterdir())
    assert room["ram_nbytes"] == room["vram_nbytes"]
    assert all(asset["load_s"] > 0 and asset["upload_s"] > 0 for asset in assets.values())
    assert answer["device"] == "host"
    advice = answer["advice"]
    budgets = ("--vram-budget", f"{advice['vram_least']}B", "--ram-budget", f"{advice['ram_least']}B")
    result = render("render", *budgets, "--workers", "4")
    assert (result.returncode, rendered()) == (0, ALL), result.stdout


def test_the_recommended_command_works() -> None:
    result = run("render", "profile", "manifest.jsonl", "--device", "host")
    assert result.returncode == 0
    typed = next(line for line in result.stdout.splitlines() if line.startswith("Try:  "))
    arguments = shlex.split(typed.removeprefix("Try:  gpuyard ").replace("MOD:FN", "renderers:render"))
    assert run(*arguments, "--device", "host").returncode == 0
    assert rendered() == ALL


def test_the_table_has_a_row_per_asset_and_the_errors_of_broken_ones() -> None:
    Path("scenes/room1.ply").write_bytes(b"ply\n")
    Path("actors/walk0/1.ply").unlink()
    result = run("render", "profile", "manifest.jsonl", "--device", "host")
    assert result.returncode == 1
    rows = {line.split()[1]: line.split() for line in result.stdout.splitlines() if line.startswith(("scene", "actor"))}
    assert rows["scenes/room1.ply"][3:] == ["-"] * 6
    assert rows["actors/walk0"][3] == "2"
    assert any(line.startswith("scene scenes/room1.ply: ") for line in result.stdout.splitlines())


def test_the_reference_names_the_options_of_a_profile() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/commands.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| `gpuyard render profile"))
    assert [option.name for option in PROFILE.VERB.options if f"--{option.name}" not in row] == []
