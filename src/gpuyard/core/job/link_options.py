"""`--linked` and `--same-node`: how the GPUs of a job on several GPUs have to be linked."""

from collections.abc import Sequence

from msgspec.structs import replace

from gpuyard.core.lease import Need
from gpuyard.core.option_values import Options
from gpuyard.errors import UserError

_SEVERAL = 2


def with_links(need: Need, options: Options) -> Need:
    """Return the need with what the options of a submission say about links."""
    is_linked, is_on_one_node = options["linked"], options["same-node"]
    given = ["--linked"] * is_linked + ["--same-node"] * is_on_one_node
    check_several(need.devices, f"--gpus {_SEVERAL}", given)
    return replace(need, is_linked=is_linked, is_on_one_node=is_on_one_node) if given else need


def check_several(count: int, example: str, given: Sequence[str]) -> None:
    """Raise UserError where such options are given for fewer than two GPUs. `example` is how a user asks for two."""
    if given and count < _SEVERAL:
        verb = "is" if len(given) == 1 else "are"
        raise UserError(
            f"{' and '.join(given)} {verb} for several GPUs, and {count or 'none'} is asked for",
            hint=f"add {example}, or leave out {' and '.join(given)}",
        )
