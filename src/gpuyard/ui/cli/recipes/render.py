"""`gpuyard render`: renders a manifest in one process that caches assets in VRAM and RAM; and `gpuyard render profile`:
memory and load time of each asset of a manifest, and recommended budgets. For a manifest named `profile`, write
`./profile`. A user's function is imported, and its signature checked, before any asset is loaded."""

import contextlib
import difflib
import gc
import importlib
import inspect
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import to_builtins

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.option import Option
from gpuyard.model.option_values import Options
from gpuyard.model.units import UNKNOWN, format_bytes
from gpuyard.recipes.render.manifest import Manifest, read
from gpuyard.recipes.render.memory.leased_memory import Budget, choose_ram, choose_vram, missing_gpu_advice, need_numpy
from gpuyard.recipes.render.planning.assets_and_units import DEFAULT_WORKERS
from gpuyard.recipes.render.status_file import Follower, RenderReport, StatusFile
from gpuyard.recipes.render.write_outputs import SkipsUnwritten, check_outputs
from gpuyard.ui.cli.command_grammar import JSON, Arguments, Command, Typed, Verb
from gpuyard.ui.cli.recipes.redirect_output import discard, forgiving_errors, reserve_stdout
from gpuyard.ui.cli.terminal import absolute, is_terminal, note, paint, say, say_json, table_lines
from gpuyard.ui.cli.text_table import Column, clean, make_columns
from gpuyard.ui.cli.verbs import EXIT_FAULT

if TYPE_CHECKING:
    from gpuyard.recipes.render.coordinator import Coordinator
    from gpuyard.recipes.render.memory.read_asset_files import Loader
    from gpuyard.recipes.render.profile_assets import Advice, AssetProfile, Profiler

RENDERER = ("scene", "frames", "label", "out_dir")
LOADER = ("path",)


def find_function(option: str, text: str, called_with: tuple[str, ...]) -> Callable[..., Any]:
    """Return the function. As with `python -m`, the current directory is searched first."""
    module_name, colon, function_name = text.partition(":")
    if not colon or not module_name or not function_name:
        raise UserError(f"{option} '{text}' is not MODULE:FUNCTION", hint=f"write it as {option} my_pkg.render:render")
    if module_name.endswith(".py") or "/" in module_name:
        guess = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise UserError(
            f"{option} takes the name of a module, not a file: '{module_name}'", hint=f"try {guess}:{function_name}"
        )
    module = _import(option, module_name)
    function: Any = module
    for part in function_name.split("."):
        if not hasattr(function, part):
            near = difflib.get_close_matches(part, [name for name in dir(function) if not name.startswith("_")], n=1)
            file = getattr(module, "__file__", None)
            hint = f"did you mean '{near[0]}'?" if near else f"the module is {file}" if file else None
            raise UserError(f"{option}: '{module_name}' has no '{function_name}'", hint=hint)
        function = getattr(function, part)
    _check(option, text, function, called_with)
    checked: Callable[..., Any] = function
    return checked


def _import(option: str, name: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            hint = "Python searches the current directory and its installed packages"
            raise UserError(f"{option}: there is no module '{error.name}'", hint=hint) from None
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
        last = next((frame for frame in reversed(frames) if frame.filename != __file__), None)
        where = f"{last.filename}, line {last.lineno}" if last is not None else None
        raise UserError(f"{option}: cannot import {name}: {type(error).__name__}: {error}", hint=where) from error


def _check(option: str, text: str, function: Any, called_with: tuple[str, ...]) -> None:
    if not callable(function):
        raise UserError(f"{option}: {text} is not a function but {type(function).__name__}")
    deferred_kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(is_kind(function) for is_kind in deferred_kinds):
        raise UserError(f"{option}: {text} is a coroutine or a generator", hint="make it a plain function")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have no signature
        return
    try:
        signature.bind(*called_with)
    except TypeError:
        call = f"it is called as {text.partition(':')[2]}({', '.join(called_with)})"
        raise UserError(f"{option}: {text} takes {signature}", hint=call) from None


def run(command: Typed) -> int:
    need_numpy()
    typed = command.values()
    if typed["renderer"] is None:
        raise UserError("which renderer?", hint="give --renderer MOD:FN, such as --renderer my_pkg.render:render_label")
    with forgiving_errors():
        with reserve_stdout(as_json=typed["json"]):
            ran = _run(command.arguments[0], typed)
        status, skipped, bad = ran.report.status, ran.report.skipped, ran.manifest.bad
        is_interrupted = status.state == "interrupted"
        is_incomplete = bool(skipped or bad or is_interrupted)
        is_printed = _print(ran, typed, "red" if is_incomplete else "green")
        for fault in ran.faults:
            note(f"gpuyard: {fault}")
        # The first error, on one line: the job's reason if this is a job (`model/error_line.py`).
        if skipped:
            reason = clean(f"{len(skipped):,} of {status.labels:,} labels skipped: {skipped[0].reason}")
            note(f"gpuyard: error: {reason}")
        elif bad:
            note(f"gpuyard: error: {clean(f'{ran.manifest.path}, {bad[0].place}: {bad[0].reason}')}")
        if is_interrupted and ran.signals:
            note("gpuyard: run the same command with --resume to render the rest")
            return 128 + ran.signals[0]
        return EXIT_FAULT if is_incomplete or ran.faults or not is_printed else 0


class _Ran(NamedTuple):
    """`out` is the output folder; `signals` are those that stopped it; `faults` are files that could not be written."""

    manifest: Manifest
    out: str
    report: RenderReport
    signals: list[int]
    faults: list[EnvironmentFault]


def _run(manifest: str, typed: Options) -> _Ran:
    render = find_function("--renderer", typed["renderer"], RENDERER)
    loader, out = _make_loader(typed["loader"]), absolute(typed["out"])
    read = _read_manifest(manifest, is_strict=typed["strict"])
    check_outputs(Path(out), read.units, resume=typed["resume"])
    file = None
    try:
        file = StatusFile(Path(absolute(typed["status"]))) if typed["status"] else StatusFile.default(Path(out))
    except UserError as error:
        if typed["status"]:
            raise
        note(f"gpuyard: no status is written: {error}; --status names another file")
    # A million labels live until the end: keep the garbage collector, which would stop all workers, from scanning them.
    gc.freeze()
    faults: list[EnvironmentFault] = []
    with _opened(typed, loader) as coordinator, _running(coordinator, file) as signals:
        try:
            report = coordinator.run(read.units, render, out, resume=typed["resume"])
        except SkipsUnwritten as fault:  # the disk was too full to write all of `skipped.jsonl`
            faults.append(fault)
            status = coordinator.status()
            assert status is not None
            report = RenderReport(status=status, skipped=fault.skipped)
    try:
        if file is not None:
            file.write(report.status)
    except EnvironmentFault as fault:
        faults.append(fault)
    return _Ran(manifest=read, out=out, report=report, signals=signals, faults=faults)


@contextlib.contextmanager
def _opened(typed: Options, loader: "Loader") -> "Iterator[Coordinator]":
    """Open the coordinator; print a note after 4 s of waiting for the VRAM budget."""
    from gpuyard.recipes.render.coordinator import Coordinator

    vram, ram = _choose_budgets(typed["vram-budget"], typed["ram-budget"], typed["device"])
    coordinator = Coordinator(
        vram=vram.mb,
        ram=ram.mb,
        scene_slots=typed["scene-slots"],
        workers=typed["workers"],
        device=typed["device"],
        loader=loader,
        order=typed["order"],
        working=typed["working-memory"],
        actor_budget=typed["actor-budget"],
    )
    waits = f"gpuyard: waiting for {vram.text()} of VRAM on one device; `gpuyard leases` shows who holds it"
    timer = threading.Timer(4.0, note, [waits])  # longer than the initialisation of CUDA
    timer.start()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(coordinator)
        finally:
            timer.cancel()
        yield coordinator


@contextlib.contextmanager
def _running(coordinator: "Coordinator", file: StatusFile | None) -> Iterator[list[int]]:
    """Show progress and write the status file meanwhile. Yield the list of signals that arrive."""
    from gpuyard.ui.views.render_view import screen

    signals: list[int] = []
    stops = "gpuyard: stopping after the current labels; press Ctrl-C again to stop at once"
    with screen() as shown, Follower(coordinator, shown.show, file, lambda: shown.note(stops)) as follower:

        def hear(signum: int, _: object) -> None:
            if signals:
                follower.abandon()
                # Without waiting for renderers; unfinished outputs stay under `.partial`, which nothing reads.
                os._exit(128 + signum)
            signals.append(signum)
            follower.stop()

        before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
        for signum, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(signum, hear)
        try:
            yield signals
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)


def _print(ran: _Ran, typed: Options, style: str) -> bool:
    from gpuyard.ui.views.render_view import summary_lines

    try:
        if typed["json"]:
            say_json({"out": ran.out, **to_builtins(ran.report), "bad": to_builtins(ran.manifest.bad)})
        else:
            first, *others = summary_lines(ran.report, ran.manifest.bad, ran.out)
            say(paint(first, style), *others)
        sys.stdout.flush()
    except OSError:
        discard(sys.stdout.fileno())
        return False
    return True


def _read_manifest(path: str, *, is_strict: bool = False) -> Manifest:
    """Read it and print its errors. UserError if no label is left, or for any error with `is_strict`."""
    manifest = read(path)
    errors = [f"{clean(path)}, {bad.place}: {clean(bad.reason)}" for bad in manifest.bad]
    if errors and is_strict:
        raise UserError("\n  ".join(["the manifest has errors:", *errors]), hint="nothing was rendered")
    for line in errors[:20]:
        note(f"gpuyard: {line}")
    if len(errors) > 20:
        note(f"gpuyard: and {len(errors) - 20:,} more; --strict lists them all")
    if not manifest.units:
        first = f": {manifest.bad[0].place}: {manifest.bad[0].reason}" if manifest.bad else ""
        raise UserError(f"nothing to render in {path}{first}", hint="`gpuyard render --help` describes its format")
    return manifest


def _make_loader(text: str | None) -> "Loader":
    from gpuyard.recipes.render.memory.read_asset_files import Loader

    return Loader(None if text is None else find_function("--loader", text, LOADER))


def _choose_budgets(vram_mb: float | None, ram_mb: float | None, device: str) -> tuple[Budget, Budget]:
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


def _run_profile(options: Typed) -> int:
    manifest, loader, device = options.arguments[0], options.text("loader"), options.values()["device"]
    as_json = options.flag("json")
    need_numpy()
    from gpuyard.recipes.render.profile_assets import OVERHEAD_NBYTES, Profiler, advise, size_option

    with reserve_stdout(as_json=as_json):
        read = _read_manifest(manifest)
        vram, ram = _choose_budgets(None, None, device)
        profiler = Profiler(_make_loader(loader), device, vram, ram)
        assets = _measured(profiler, read)
    overhead = 0 if profiler.name == "host" else OVERHEAD_NBYTES
    advice = advise(assets, scene_slots=_SCENE_SLOTS, workers=DEFAULT_WORKERS, overhead=overhead)
    vram_nbytes, ram_nbytes = int(vram.mb) << 20, int(ram.mb) << 20
    command = ["gpuyard", "render", manifest, "--renderer", "MOD:FN"]
    command += [] if loader is None else ["--loader", loader]
    command += ["--vram-budget", size_option(min(advice.vram_plenty, max(vram_nbytes, advice.vram_least)))]
    command += ["--ram-budget", size_option(min(advice.ram_plenty, max(ram_nbytes, advice.ram_least)))]
    typed = shlex.join(command)
    if as_json:
        measured = {"assets": to_builtins(assets), "advice": to_builtins(advice)}
        say_json({"device": profiler.name, **measured, "command": typed})
    else:
        _say_assets(assets, os.path.dirname(os.path.abspath(manifest)))
        _say_advice(advice, typed)
        for what, least, free in (("VRAM", advice.vram_least, vram_nbytes), ("RAM", advice.ram_least, ram_nbytes)):
            if least > free:
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


def _say_assets(assets: "Sequence[AssetProfile]", folder: str) -> None:
    columns = make_columns(
        "kind", "asset", "labels", "frames", "on disk", "in RAM", "in VRAM", "load", "upload", long=("asset",),
        right=("labels", "frames", "on disk", "in RAM", "in VRAM", "load", "upload"), spare=("labels", "on disk"),
    )  # fmt: skip

    def figures(value: "Callable[[str], float | None]") -> list[str]:
        sizes = (format_bytes(value(name)) for name in ("disk_nbytes", "ram_nbytes", "vram_nbytes"))
        return [*sizes, *(_time(value(name)) for name in ("load_s", "upload_s"))]

    rows = [
        [
            str(asset.kind),
            clean(_short(asset.path, folder)),
            f"{asset.labels:,}",
            UNKNOWN if asset.frames is None else f"{asset.frames:,}",
            *figures(partial(getattr, asset)),
        ]
        for asset in assets
    ]
    frames = sum(asset.frames or 0 for asset in assets)
    totals = figures(lambda name: sum(getattr(asset, name) or 0 for asset in assets))
    rows.append(["all", f"{len(assets):,} assets", "", f"{frames:,}", *totals])
    say(*table_lines(columns, rows))
    for asset in assets:
        if asset.problem is not None:
            say(paint(f"{asset.kind} {clean(_short(asset.path, folder))}: {clean(asset.problem)}", "red"))


def _short(path: str, folder: str) -> str:
    inside = os.path.relpath(path, folder)
    return path if inside.startswith("..") else inside


def _time(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _say_advice(advice: "Advice", typed: str) -> None:
    columns = (Column(""), Column("VRAM", is_right=True), Column("RAM", is_right=True), Column("", is_long=True))
    all_actors = f"{_SCENE_SLOTS} scenes and {DEFAULT_WORKERS} actors in VRAM, and all in RAM"
    rows = [
        ("minimum", advice.vram_least, advice.ram_least, "one scene; actors are streamed frame by frame"),
        ("good", advice.vram_good, advice.ram_good, f"{_SCENE_SLOTS} scenes and the largest actor in VRAM"),
        ("plenty", advice.vram_plenty, advice.ram_plenty, all_actors),
    ]
    table = table_lines(columns, [[name, format_bytes(vram), format_bytes(ram), why] for name, vram, ram, why in rows])
    say("", *table, "Memory that the renderer itself allocates in VRAM comes on top.", "", f"Try:  {typed}")


_MANIFEST = Arguments("MANIFEST")
_LOADER = Option("loader", "text", "MOD:FN", "Reads files that are not PLY: FN(path) returns arrays by name.")
_DEVICE = Option(
    "device", "choice", "[auto|cuda|host]", "A GPU through PyTorch, or a simulated one in RAM (host).",
    choices=("auto", "cuda", "host"), default="auto",
)  # fmt: skip
PROFILE = Command(
    Verb(
        """Load and upload every asset of MANIFEST once, and recommend budgets.

        Exit status 1 if an asset cannot be loaded.
        """,
        (_LOADER, _DEVICE, JSON),
        _MANIFEST,
    ),
    _run_profile,
)
VERB = Verb(
    """Render every label of MANIFEST, with scenes and actors cached in VRAM and RAM while they are needed.

    MANIFEST is a JSON array, or JSON Lines, of {"scene": path, "actor": path or null, "labels": [...]}. The
    output of a label, DIR/NAME, is complete or absent. A label that cannot be rendered becomes a line of
    DIR/skipped.jsonl, and the others continue.

    \b
    gpuyard render manifest.json --renderer my_pkg.render:render_label --vram-budget 44G --ram-budget 90G
    gpuyard render manifest.json --renderer my_pkg.render:render_label --resume
    gpuyard render profile manifest.json    recommends budgets; see `gpuyard render profile --help`

    Exit status 0 if every label is rendered, 1 if some were skipped.
    """,
    (
        Option("renderer", "text", "MOD:FN", "Called as FN(scene, frames, label, out_dir).", note="required"),
        Option("vram-budget", "size", "SIZE", "VRAM to use, such as 44G.", note="80% of free VRAM"),
        Option("ram-budget", "size", "SIZE", "RAM to cache assets in, such as 90G.", note="half of available RAM"),
        Option("actor-budget", "size", "SIZE", "Part of the VRAM that actors may take.", note="what scenes leave free"),
        Option("working-memory", "size", "SIZE", "VRAM that the renderer itself uses.", note="measured", least=0),
        Option("scene-slots", "whole", "N", "Maximum number of scenes in VRAM.", default="5", least=1),
        Option("workers", "whole", "N", "Number of labels to render at once, each in a thread.",
               default=str(DEFAULT_WORKERS), least=1),
        Option("out", "text", "DIR", "Directory with a folder per label.", default="out"),
        Option("resume", "flag", None, "Keep complete outputs, and render the rest."),
        Option("strict", "flag", None, "Fail if the manifest contains any error."),
        Option("order", "choice", "[chosen|manifest]",
               "chosen: the order that loads the fewest bytes; manifest: the order of the file.",
               choices=("chosen", "manifest"), default="chosen"),
        _LOADER,
        _DEVICE,
        Option("status", "text", "FILE", "Write the status to this file each second, as JSON.",
               note="DIR/status.json, after a minute"),
        JSON,
    ),
    _MANIFEST,
    commands={"profile": PROFILE},
)  # fmt: skip
