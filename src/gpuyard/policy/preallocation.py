"""Programs that preallocate nearly a whole device: their memory says nothing about their need, so they share no device.

A framework is recognised by the command, the output and the loaded libraries, and while it runs by the shape of its
climb. Advice is given only if it did hold that much and the user has not set how much to take.
"""

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

# A jump between two samples goes to at least this part of the devices.
JUMP_PART = 0.7


class _Framework(Struct, frozen=True, kw_only=True):
    """How a framework preallocates, and how users limit it: by a variable or a flag."""

    name: str
    pattern: re.Pattern[str]
    least: float  # the part of a device that it holds at least if it preallocates
    variables: dict[str, frozenset[str]] = {}  # with the values that limit it; any value does if none is listed
    flags: tuple[str, ...] = ()
    off: tuple[str, str] | None = None  # the variable and its value that turn preallocation off
    advice: str


# The order matters: model servers use the other frameworks, and JAX includes parts of TensorFlow.
_FRAMEWORKS = (
    _Framework(
        name="vLLM",
        pattern=re.compile(r"\bvllm\b"),
        least=0.8,
        flags=("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--kv-cache-memory"),
        advice="vLLM takes most of a device for its cache, whatever the model needs: "
        "give it less with --gpu-memory-utilization 0.4 (or gpu_memory_utilization=0.4 in Python)",
    ),
    _Framework(
        name="SGLang",
        pattern=re.compile(r"\bsglang\b"),
        least=0.75,
        flags=("--mem-fraction-static",),
        advice="SGLang takes most of a device for its cache, whatever the model needs: "
        "give it less with --mem-fraction-static 0.4",
    ),
    _Framework(
        name="JAX",
        pattern=re.compile(r"\b(?:jax|jaxlib|jax_plugins)[./]|\b(?:Xla|Jax)RuntimeError\b|\bexternal/xla/"),
        least=0.7,
        variables={
            "XLA_PYTHON_CLIENT_PREALLOCATE": frozenset({"0", "false", "f", "no", "off"}),
            "XLA_PYTHON_CLIENT_ALLOCATOR": frozenset({"platform"}),
            "XLA_PYTHON_CLIENT_MEM_FRACTION": frozenset(),
            "XLA_CLIENT_MEM_FRACTION": frozenset(),
        },
        off=("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),
        advice="JAX takes 75% of a device at its start, whatever it needs: "
        "set XLA_PYTHON_CLIENT_PREALLOCATE=false so that others can share the device",
    ),
    _Framework(
        name="TensorFlow",
        pattern=re.compile(r"\btensorflow[./]"),
        least=0.85,
        variables={
            "TF_FORCE_GPU_ALLOW_GROWTH": frozenset({"1", "true", "t", "yes", "on"}),
            "TF_GPU_ALLOCATOR": frozenset({"cuda_malloc_async"}),
        },
        off=("TF_FORCE_GPU_ALLOW_GROWTH", "true"),
        advice="TensorFlow takes nearly all of a device at its start, whatever it needs: "
        "set TF_FORCE_GPU_ALLOW_GROWTH=true so that others can share the device",
    ),
)


def find_preallocation(
    command: Sequence[str], environment: Mapping[str, str], text: str, peak_mb: float | None, total_mb: float | None
) -> tuple[str, str] | None:
    """Return the name of the framework and a sentence that says what to set; None where the program is not known to
    preallocate, or did not. `text` is its output with the names of its libraries, as many programs never print
    theirs."""
    if peak_mb is None or not total_mb:
        return None
    known = "\n".join([*command, text])
    framework = next((framework for framework in _FRAMEWORKS if framework.pattern.search(known)), None)
    if framework is None or peak_mb < framework.least * total_mb or _is_limited(framework, command, environment):
        return None
    return framework.name, framework.advice


def has_jumped(curve: Sequence[tuple[float, float]], total_mb: float) -> bool:
    """Return whether memory, as pairs of seconds and MB, has gone from little to most of all devices in one jump."""
    place = next((place for place, (_, used) in enumerate(curve) if used >= JUMP_PART * total_mb), None)
    if not place:  # before the first sample it has used nothing
        return place == 0
    (before_s, before_mb), (at_s, _) = curve[place - 1], curve[place]
    return before_mb <= 0.15 * total_mb and at_s - before_s <= 2.5


def frameworks_set_to_grow(command: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the frameworks of which the user has set how much they take."""
    return tuple(each.name for each in _FRAMEWORKS if _is_limited(each, command, environment))


def growth_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that turn preallocation off, but of frameworks that this environment configures already."""
    untouched = (each for each in _FRAMEWORKS if environment.keys().isdisjoint(each.variables))
    return dict(each.off for each in untouched if each.off is not None)


def _is_limited(framework: _Framework, command: Sequence[str], environment: Mapping[str, str]) -> bool:
    if any(word.partition("=")[0].replace("_", "-") in framework.flags for word in command):
        return True
    return any(
        name in environment and (not values or environment[name].strip().lower() in values)
        for name, values in framework.variables.items()
    )
