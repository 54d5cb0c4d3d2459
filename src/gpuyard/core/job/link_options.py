"""`--linked` and `--same-node`: how the GPUs of a job on several GPUs have to be linked."""

from msgspec.structs import replace

from gpuyard.core.device_names import SEVERAL, check_several
from gpuyard.core.job.option_parser import Options
from gpuyard.core.lease import Need


def with_links(need: Need, options: Options) -> Need:
    """Return the need with what the options of a submission say about links."""
    is_linked, is_on_one_node = options["linked"], options["same-node"]
    given = ["--linked"] * is_linked + ["--same-node"] * is_on_one_node
    check_several(need.devices, f"--gpus {SEVERAL}", given)
    return replace(need, is_linked=is_linked, is_on_one_node=is_on_one_node) if given else need
