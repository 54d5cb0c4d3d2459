"""A stand-in for conda and micromamba: prints what they print to their shell functions, for real folders.

Called as `conda`, it takes `shell.posix activate NAME`; as `micromamba` or `mamba`, `shell activate --shell posix
--prefix NAME`; and `env list --json` in either role. Environments are folders in `envs` beside its `bin`.
"""

import json
import os
import sys
from pathlib import Path

ROOT = Path(sys.argv[1]).parent.parent
TOOL = Path(sys.argv[1]).name


def prefix_of(name: str) -> Path:
    if name == "base":
        return ROOT
    return Path(name) if "/" in name else ROOT / "envs" / name


def hooks(prefix: str, kind: str) -> list[str]:
    return [f'. "{path}"' for path in sorted(Path(prefix, "etc", "conda", f"{kind}.d").glob("*.sh"))]


def activation(prefix: Path) -> list[str]:
    level = int(os.environ.get("CONDA_SHLVL") or 0)
    before = os.environ.get("CONDA_PREFIX", "")
    folders = [each for each in os.environ["PATH"].split(":") if not level or each != f"{before}/bin"]
    variables = {
        "PATH": ":".join([f"{prefix}/bin", *folders]),
        "CONDA_PREFIX": prefix,
        "CONDA_SHLVL": level + 1,
        "CONDA_DEFAULT_ENV": prefix.name,
        "CONDA_PROMPT_MODIFIER": f"({prefix.name}) ",
    }
    lines = hooks(before, "deactivate") if level else []
    if level:
        variables[f"CONDA_PREFIX_{level}"] = before
    lines += [f"PS1='({prefix.name}) '", *(f"export {name}='{value}'" for name, value in variables.items())]
    return lines + hooks(str(prefix), "activate")


def main(argv: list[str]) -> None:
    if argv == ["env", "list", "--json"]:
        json.dump({"envs": [str(ROOT), *map(str, sorted((ROOT / "envs").iterdir()))]}, sys.stdout)
        return
    asked = ["shell.posix", "activate"] if TOOL == "conda" else ["shell", "activate", "--shell", "posix", "--prefix"]
    if argv[:-1] != asked:
        sys.exit(f"{TOOL}: what is {argv}?")
    prefix = prefix_of(argv[-1])
    if not (prefix / "conda-meta").is_dir():
        sys.exit(f"\nEnvironmentNameNotFound: Could not find conda environment: {argv[-1]}\n")
    sys.stdout.write("\n".join(activation(prefix)))


if __name__ == "__main__":
    main(sys.argv[2:])
