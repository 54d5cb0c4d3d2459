"""Where gpuyard keeps its things, and the settings that come from the environment.

`GPUYARD_HOME=DIR` puts everything under one folder, so that a trial or a test touches nothing else.
"""

import os
from pathlib import Path


def state_dir() -> Path:
    """What must outlive a reboot."""
    home = os.environ.get("GPUYARD_HOME")
    if home:
        return Path(home).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_state_dir("gpuyard", appauthor=False))


def simulated_devices() -> str | None:
    """The value of GPUYARD_SIMULATE, such as `2x24GB`, where simulated devices stand in for real ones."""
    return os.environ.get("GPUYARD_SIMULATE") or None
