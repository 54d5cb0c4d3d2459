"""`gpuyard render profile`: sizes and load times of assets, and recommended budgets that suffice."""

import json
import shlex
from pathlib import Path

import pytest

from gpuyard.ui.cli.recipes.render import PROFILE
from tests.fakes.queue_command import run
from tests.integration.render_fixture import (
    ALL,
    folder,  # noqa: F401 - a fixture is found where it is named
    render,
    rendered,
)

pytestmark = pytest.mark.usefixtures("folder")
ROOT = Path(__file__).parents[2]


def test_every_asset_is_measured_in_each_tier() -> None:
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


def test_the_least_recommended_budgets_suffice_for_all_labels() -> None:
    advice = json.loads(run("render", "profile", "manifest.jsonl", "--device", "host", "--json").stdout)["advice"]
    budgets = ("--vram-budget", f"{advice['vram_least']}B", "--ram-budget", f"{advice['ram_least']}B")
    result = render("render", *budgets, "--workers", "4")
    assert result.returncode == 0, result.stdout
    assert rendered() == ALL


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


def test_the_reference_names_its_options() -> None:
    page = (ROOT / "docs/reference/commands.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| `gpuyard render profile"))
    options = [f"--{option.name}" for option in PROFILE.VERB.options]
    assert [name for name in options if name not in row] == []
