"""`gpuyard render profile`: memory and load time of each asset of a manifest, and recommended budgets; with the
options that it shares with `gpuyard render`.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import to_builtins

from gpuyard.errors import UserError
from gpuyard.model.option import Option
from gpuyard.model.units import UNKNOWN, format_bytes
from gpuyard.recipes.render.load_function import LOADER as LOADER_CONTRACT
from gpuyard.recipes.render.load_function import find_function
from gpuyard.recipes.render.manifest import Manifest, read
from gpuyard.recipes.render.memory.leased_memory import Budget, choose_ram, choose_vram, missing_gpu_advice, need_numpy
from gpuyard.recipes.render.planning.assets_and_units import DEFAULT_WORKERS
from gpuyard.ui.cli import EXIT_FAULT
from gpuyard.ui.cli.command_grammar import JSON, Arguments, Command, Typed, Verb
from gpuyard.ui.cli.recipes.redirect_output import reserve_stdout
from gpuyard.ui.cli.terminal import is_terminal, note, paint, say, say_json, table_lines
from gpuyard.ui.cli.text_table import Column, clean

if TYPE_CHECKING:
    from gpuyard.recipes.render.memory.read_asset_files import Loader
    from gpuyard.recipes.render.profile_assets import Advice, AssetProfile, Profiler

_MOST_SHOWN = 20

MANIFEST = Arguments("MANIFEST")
LOADER = Option("loader", "text", "MOD:FN", "Reads files that are not PLY: FN(path) returns arrays by name.")
DEVICE = Option(
    "device", "choice", "[auto|cuda|host]", "A GPU through PyTorch, or a simulated one in RAM (host).",
    choices=("auto", "cuda", "host"), default="auto",
)  # fmt: skip


def read_manifest(path: str, *, is_strict: bool = False) -> Manifest:
    """Read it and print its errors. UserError if no label is left, or for any error with `is_strict`."""
    manifest = read(path)
    errors = [f"{clean(path)}, {bad.place}: {clean(bad.reason)}" for bad in manifest.bad]
    if errors and is_strict:
        raise UserError("\n  ".join(["the manifest has errors:", *errors]), hint="nothing was rendered")
    for line in errors[:_MOST_SHOWN]:
        note(f"gpuyard: {line}")
    if len(errors) > _MOST_SHOWN:
        note(f"gpuyard: and {len(errors) - _MOST_SHOWN:,} more; --strict lists them all")
    if not manifest.units:
        first = f": {manifest.bad[0].place}: {manifest.bad[0].reason}" if manifest.bad else ""
        raise UserError(f"nothing to render in {path}{first}", hint="`gpuyard render --help` describes its format")
    return manifest


def make_loader(text: str | None) -> "Loader":
    from gpuyard.recipes.render.memory.read_asset_files import Loader

    return Loader(None if text is None else find_function("--loader", text, LOADER_CONTRACT))


def choose_budgets(vram_mb: float | None, ram_mb: float | None, device: str) -> tuple[Budget, Budget]:
    """Return the budgets of VRAM and RAM as given, or a part of the free memory; a default is printed."""
    vram = choose_vram(device) if vram_mb is None else Budget(mb=vram_mb)
    ram = choose_ram() if ram_mb is None else Budget(mb=ram_mb)
    if (advice := missing_gpu_advice(device)) is not None:
        why, remedy = advice
        note(f"gpuyard: {why}\n  {remedy}; --device host asks for RAM, without this note")
    budgets = {"--vram-budget": vram, "--ram-budget": ram}
    chosen = [f"{option} is {budget.text()}" for option, budget in budgets.items() if budget.why is not None]
    if chosen:
        note(f"gpuyard: {', '.join(chosen)}")
    return vram, ram


_SCENE_SLOTS = 5
_ASSETS = (
    Column("kind"),
    Column("asset", is_long=True),
    Column("labels", is_right=True, is_spare=True),
    Column("frames", is_right=True),
    Column("on disk", is_right=True, is_spare=True),
    Column("in RAM", is_right=True),
    Column("in VRAM", is_right=True),
    Column("load", is_right=True),
    Column("upload", is_right=True),
)
_BUDGETS = (Column(""), Column("VRAM", is_right=True), Column("RAM", is_right=True), Column("", is_long=True))


def run(options: Typed) -> int:
    manifest, loader, device = options.arguments[0], options.text("loader"), options.values()["device"]
    as_json = options.flag("json")
    need_numpy()
    from gpuyard.recipes.render.profile_assets import OVERHEAD_NBYTES, Profiler, advise

    with reserve_stdout(as_json=as_json):
        read = read_manifest(manifest)
        vram, ram = choose_budgets(None, None, device)
        profiler = Profiler(make_loader(loader), device, vram, ram)
        assets = _measured(profiler, read)
    overhead = 0 if profiler.name == "host" else OVERHEAD_NBYTES
    advice = advise(assets, scene_slots=_SCENE_SLOTS, workers=DEFAULT_WORKERS, overhead=overhead)
    typed = _command(manifest, loader, advice, int(vram.mb) << 20, int(ram.mb) << 20)
    if as_json:
        measured = {"assets": to_builtins(assets), "advice": to_builtins(advice)}
        say_json({"device": profiler.name, **measured, "command": typed})
    else:
        _say_assets(assets, os.path.dirname(os.path.abspath(manifest)))
        _say_advice(advice, typed)
        for what, least, budget in (("VRAM", advice.vram_least, vram), ("RAM", advice.ram_least, ram)):
            if least > int(budget.mb) << 20:
                note(f"gpuyard: {format_bytes(least)} of {what} is more than this machine has free now")
    return EXIT_FAULT if any(asset.problem is not None for asset in assets) else 0


def _measured(profiler: "Profiler", manifest: Manifest) -> "list[AssetProfile]":
    """Measure all assets, with a progress bar on a terminal: it may take minutes."""
    from gpuyard.recipes.render.profile_assets import assets_of
    from gpuyard.ui.views.live_display import LiveDisplay, progress_head

    assets = assets_of(manifest.units)
    measured: list[AssetProfile] = []
    with LiveDisplay(sys.stderr, is_transient=True) as shown:
        for each in profiler.measure(assets):
            measured.append(each)
            if is_terminal(sys.stderr):
                text = f"{len(measured):,} of {len(assets):,} assets measured"
                shown.draw([progress_head("", len(measured) / len(assets), text, "green", shown.frame())])
    return measured


def _command(manifest: str, loader: str | None, advice: "Advice", vram: int, ram: int) -> str:
    from gpuyard.recipes.render.profile_assets import size_option

    command = ["gpuyard", "render", manifest, "--renderer", "MOD:FN"]
    command += [] if loader is None else ["--loader", loader]
    command += ["--vram-budget", size_option(min(advice.vram_plenty, max(vram, advice.vram_least)))]
    command += ["--ram-budget", size_option(min(advice.ram_plenty, max(ram, advice.ram_least)))]
    return shlex.join(command)


def _say_assets(assets: "Sequence[AssetProfile]", folder: str) -> None:
    say(*table_lines(_ASSETS, [*(_row(asset, folder) for asset in assets), _totals(assets)]))
    for asset in assets:
        if asset.problem is not None:
            say(paint(f"{asset.kind} {clean(_short(asset.path, folder))}: {clean(asset.problem)}", "red"))


def _row(asset: "AssetProfile", folder: str) -> list[str]:
    sizes = (asset.disk_nbytes, asset.ram_nbytes, asset.vram_nbytes)
    frames = UNKNOWN if asset.frames is None else f"{asset.frames:,}"
    times = (asset.load_s, asset.upload_s)
    name = clean(_short(asset.path, folder))
    return [str(asset.kind), name, f"{asset.labels:,}", frames, *map(format_bytes, sizes), *map(_time, times)]


def _totals(assets: "Sequence[AssetProfile]") -> list[str]:
    def total(field: str) -> float:
        return sum(getattr(asset, field) or 0 for asset in assets)

    sizes = map(total, ("disk_nbytes", "ram_nbytes", "vram_nbytes"))
    times = map(total, ("load_s", "upload_s"))
    return ["all", f"{len(assets):,} assets", "", f"{total('frames'):,}", *map(format_bytes, sizes), *map(_time, times)]


def _short(path: str, folder: str) -> str:
    inside = os.path.relpath(path, folder)
    return path if inside.startswith("..") else inside


def _time(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _say_advice(advice: "Advice", typed: str) -> None:
    all_actors = f"{_SCENE_SLOTS} scenes and {DEFAULT_WORKERS} actors in VRAM, and all in RAM"
    rows = [
        ("minimum", advice.vram_least, advice.ram_least, "one scene; actors are streamed frame by frame"),
        ("good", advice.vram_good, advice.ram_good, f"{_SCENE_SLOTS} scenes and the largest actor in VRAM"),
        ("plenty", advice.vram_plenty, advice.ram_plenty, all_actors),
    ]
    table = table_lines(_BUDGETS, [[name, format_bytes(vram), format_bytes(ram), why] for name, vram, ram, why in rows])
    say("", *table, "Memory that the renderer itself allocates in VRAM comes on top.", "", f"Try:  {typed}")


PROFILE = Command(
    Verb(
        """Load and upload every asset of MANIFEST once, and recommend budgets.

        Exit status 1 if an asset cannot be loaded.
        """,
        (LOADER, DEVICE, JSON),
        MANIFEST,
    ),
    run,
)
