"""A stand-in for conda, mamba and micromamba, for real folders: `run -n NAME COMMAND...`, `run -p PATH COMMAND...` and
`env list --json`. Environments are folders in `envs` beside its `bin`. As theirs, its `run` is a script for bash."""

import json
import os
import shlex
import sys
from pathlib import Path

ROOT = Path(sys.argv[1]).parent.parent


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
    _, option, name, *command = argv
    prefix = Path(name) if option == "-p" else ROOT if name == "base" else ROOT / "envs" / name
    if not (prefix / "conda-meta").is_dir():
        sys.exit(f"\nEnvironmentLocationNotFound: Not a conda environment: {prefix}\n")
    script = "\n".join([*activation(prefix), f"exec {shlex.join(command)}"])
    os.execvp("bash", ["bash", "-c", script])


if __name__ == "__main__":
    main(sys.argv[2:])
