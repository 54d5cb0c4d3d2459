"""The options that `gpuyard render` and `gpuyard render profile` share."""

from typing import TYPE_CHECKING

from gpuyard.core.option import Option
from gpuyard.errors import UserError
from gpuyard.recipes.render.default_budgets import Budget, choose_ram, choose_vram
from gpuyard.recipes.render.load_function import LOADER as LOADER_CONTRACT
from gpuyard.recipes.render.load_function import find_function
from gpuyard.recipes.render.manifest import Manifest, read
from gpuyard.residency.memory.open_memory import missing_gpu_advice
from gpuyard.ui.cli.terminal import note
from gpuyard.ui.cli.text_table import clean
from gpuyard.ui.cli.verb_options import Arguments

if TYPE_CHECKING:
    from gpuyard.residency.loading.asset_loader import Loader

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
    from gpuyard.residency.loading.asset_loader import Loader

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
