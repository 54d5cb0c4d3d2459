"""What `gpuyard doctor` says about limits of RAM."""

from gpuyard.config import load_config
from gpuyard.connect import paths
from gpuyard.connect.daemon_lock import running_pid
from gpuyard.engines.local.job_cgroups import find_delegated
from gpuyard.errors import EnvironmentFault


def ram_limit_notices() -> list[str]:
    """Return why the RAM that jobs declare cannot be enforced, if the configuration asks for that. The cgroup of the
    daemon decides, if it runs."""
    if not load_config().host.enforce_ram:
        return []
    pid = running_pid(paths.lock_path())
    try:
        find_delegated("self" if pid is None else str(pid))
    except EnvironmentFault as error:
        return [f"[host] enforce_ram has no effect: {error} ({error.hint})"]
    return []
