"""A daemon that looks for its cgroup in a folder: `GPUYARD_TEST_CGROUP_ROOT=DIR python delegated_host.py`."""

import os
import sys
from functools import partial
from pathlib import Path

from gpuyard.daemon.main import run_daemon
from gpuyard.engines.local import engine
from gpuyard.engines.local.job_cgroups import JobCgroups

COMMAND = (sys.executable, "-P", str(Path(__file__).resolve()))


def make_tree(root: Path, base: Path) -> None:
    """Make the files of a delegated cgroup, in whose child the daemon is."""
    (base / "gpuyard-daemon").mkdir(parents=True)
    for name, text in (("cgroup.controllers", "memory"), ("cgroup.subtree_control", ""), ("cgroup.procs", "")):
        (base / name).write_text(text)
    (root / "sys/fs/cgroup/cgroup.controllers").write_text("memory")
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"0::/{base.name}/gpuyard-daemon\n")


if __name__ == "__main__":
    root = Path(os.environ["GPUYARD_TEST_CGROUP_ROOT"])
    vars(engine)["JobCgroups"] = partial(JobCgroups, root=root)
    sys.exit(run_daemon())
