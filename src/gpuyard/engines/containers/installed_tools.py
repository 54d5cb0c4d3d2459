"""Which container tool is installed, and whether podman has an init."""

import os
import shutil

from gpuyard.core.job.container import CONTAINER_TOOLS
from gpuyard.errors import UserError

# Where podman looks for `catatonit`, by its version and its distribution.
_INITS = tuple(
    f"{folder}/catatonit"
    for folder in ("/usr/libexec/podman", "/usr/local/libexec/podman", "/usr/lib/podman", "/usr/local/lib/podman")
)


def installed_tools(path: str | None = None) -> list[str]:
    """Return the installed tools on a PATH, the preferred one first."""
    return [tool for tool in CONTAINER_TOOLS if shutil.which(tool, path=path)]


def choose_tool(configured: str, path: str | None = None) -> str:
    """Return the tool for a job's container: the configured one, or for "auto" the first that is installed."""
    found = installed_tools(path)
    if configured == "auto" and found:
        return found[0]
    if configured in found:
        return configured
    if configured == "auto":
        raise UserError(
            "--image needs podman, docker or apptainer, and none of them is on PATH",
            hint="install podman, or add the tool's folder to PATH",
        )
    raise UserError(
        f"--image: {configured}, the tool in [containers] of config.toml, is not on PATH",
        hint=f"install it, or set the tool to {' or '.join(found) or 'another'} in config.toml",
    )


def has_podman_init() -> bool:
    return any(map(os.path.exists, _INITS)) or shutil.which("catatonit") is not None
