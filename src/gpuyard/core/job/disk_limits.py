"""How much disk space a job wants to find free before it starts, and where."""

from msgspec import Struct

from gpuyard.core.option_values import Options
from gpuyard.errors import UserError


class DiskLimits(Struct, frozen=True, kw_only=True):
    """`min_free_mb` is the least free space, 0 for no limit; None: as configured. `output_root` is the folder of all
    runs of a batch."""

    min_free_mb: float | None = None
    output_root: str | None = None


def parse_disk_limits(options: Options) -> DiskLimits:
    root = options["output-root"]
    if root is not None and not root.startswith("/"):
        raise UserError(f"--output-root '{root}' is not an absolute path", hint="give the whole path of the folder")
    return DiskLimits(min_free_mb=options["min-free-disk"], output_root=root)
