"""Programs that take nearly a whole device at once, whatever they need, and what to set so that they do not.

What such a program holds says nothing about what it needs, so it can share with nobody. A program is known by what it
was started with and what it wrote or loaded, and it is only spoken of when it did hold that much. One that was told
how much to take (a fraction, a flag) takes what its user meant, and nothing is said.
"""

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

_ANY: frozenset[str] = frozenset()
_YES = frozenset({"1", "true", "t", "yes", "on"})
_NO = frozenset({"0", "false", "f", "no", "off"})


class _Habit(Struct, frozen=True, kw_only=True):
    """`least` is the share of a device it holds when it does this; `variables` and `flags` are how users say otherwise.

    A variable counts with one of its values, or with any where none is named.
    """

    mark: re.Pattern[str]
    least: float
    variables: dict[str, frozenset[str]]
    flags: tuple[str, ...] = ()
    advice: str


# What serves models is built on the other frameworks, and JAX carries parts of TensorFlow: the order matters.
_HABITS = (
    _Habit(
        mark=re.compile(r"\bvllm\b"),
        least=0.8,
        variables={},
        flags=("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--kv-cache-memory"),
        advice="vLLM takes most of a device for its cache, whatever the model needs: "
        "give it less with --gpu-memory-utilization 0.4 (or gpu_memory_utilization=0.4 in Python)",
    ),
    _Habit(
        mark=re.compile(r"\bsglang\b"),
        least=0.75,
        variables={},
        flags=("--mem-fraction-static",),
        advice="SGLang takes most of a device for its cache, whatever the model needs: "
        "give it less with --mem-fraction-static 0.4",
    ),
    _Habit(
        mark=re.compile(r"\b(?:jax|jaxlib|jax_plugins)[./]|\b(?:Xla|Jax)RuntimeError\b|\bexternal/xla/"),
        least=0.7,
        variables={
            "XLA_PYTHON_CLIENT_PREALLOCATE": _NO,
            "XLA_PYTHON_CLIENT_ALLOCATOR": frozenset({"platform"}),
            "XLA_PYTHON_CLIENT_MEM_FRACTION": _ANY,
            "XLA_CLIENT_MEM_FRACTION": _ANY,
        },
        advice="JAX takes 75% of a device at its start, whatever it needs: "
        "set XLA_PYTHON_CLIENT_PREALLOCATE=false so that others can share the device",
    ),
    _Habit(
        mark=re.compile(r"\btensorflow[./]"),
        least=0.85,
        variables={"TF_FORCE_GPU_ALLOW_GROWTH": _YES, "TF_GPU_ALLOCATOR": frozenset({"cuda_malloc_async"})},
        advice="TensorFlow takes nearly all of a device at its start, whatever it needs: "
        "set TF_FORCE_GPU_ALLOW_GROWTH=true so that others can share the device",
    ),
)


def preallocation_advice(
    command: Sequence[str],
    environment: Mapping[str, str],
    text: str,
    peak_mb: float | None,
    total_mb: float | None,
) -> str | None:
    """One sentence that says what to set; `None` where the program is not known to do this, or did not do it here.

    `text` is what it wrote, and may have the names of the libraries it loaded with it: many programs never name theirs.
    """
    if peak_mb is None or not total_mb:
        return None
    known = "\n".join([*command, text])
    habit = next((habit for habit in _HABITS if habit.mark.search(known)), None)
    if habit is None or peak_mb < habit.least * total_mb or _is_told(habit, command, environment):
        return None
    return habit.advice


def _is_told(habit: _Habit, command: Sequence[str], environment: Mapping[str, str]) -> bool:
    if any(word.partition("=")[0].replace("_", "-") in habit.flags for word in command):
        return True
    return any(
        name in environment and (not values or environment[name].strip().lower() in values)
        for name, values in habit.variables.items()
    )
