"""Advice for users of programs that preallocate a whole device."""

import pytest

from gpuyard.policy.preallocation import find_preallocation, frameworks_set_to_grow, growth_variables, has_jumped
from tests.known import known

CARD_MB = 24576.0
JAX = "site-packages/jaxlib/xla_extension.so"
TENSORFLOW = "2026-01-01 00:00:00.1: I tensorflow/core/common_runtime/gpu/gpu_device.cc:1928] Created device"
TRAIN = ("python", "train.py")
SERVE = ("vllm", "serve", "some/model")


def advice(
    command: tuple[str, ...], text: str, share: float | None, environment: dict[str, str] | None = None
) -> str | None:
    found = find_preallocation(command, environment or {}, text, None if share is None else share * CARD_MB, CARD_MB)
    return None if found is None else found[1]


@pytest.mark.parametrize(
    ("command", "text", "share", "setting"),
    [
        (TRAIN, JAX, 0.77, "XLA_PYTHON_CLIENT_PREALLOCATE=false"),
        (TRAIN, "jaxlib.xla_extension.XlaRuntimeError: INTERNAL", 0.75, "XLA_PYTHON_CLIENT_PREALLOCATE=false"),
        (TRAIN, TENSORFLOW, 0.95, "TF_FORCE_GPU_ALLOW_GROWTH=true"),
        (TRAIN, f"{TENSORFLOW}\n{JAX}", 0.95, "XLA_PYTHON_CLIENT_PREALLOCATE=false"),
        (SERVE, "", 0.91, "--gpu-memory-utilization"),
        (("python", "-m", "vllm.entrypoints.openai.api_server"), "", 0.9, "--gpu-memory-utilization"),
        (("python", "-m", "sglang.launch_server"), "", 0.88, "--mem-fraction-static"),
    ],
)
def test_it_says_what_to_set(command: tuple[str, ...], text: str, share: float, setting: str) -> None:
    line = known(advice(command, text, share))
    assert setting in line
    assert "\n" not in line


@pytest.mark.parametrize("share", [0.1, 0.6, None])
def test_a_program_that_leaves_memory_to_others_gets_no_advice(share: float | None) -> None:
    assert advice(TRAIN, JAX, share) is None
    assert advice(SERVE, "", share) is None


def test_other_programs_and_settings_that_change_nothing() -> None:
    assert advice(TRAIN, "epoch 1\nepoch 2\n", 0.99) is None
    assert find_preallocation(TRAIN, {}, JAX, 20000.0, None) is None, "an unknown program gets no advice"
    # A setting that changes nothing does not silence it.
    assert advice(TRAIN, JAX, 0.77, {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}) is not None
    assert advice(TRAIN, TENSORFLOW, 0.95, {"TF_FORCE_GPU_ALLOW_GROWTH": "false"}) is not None
    growing = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    assert "JAX" in frameworks_set_to_grow(TRAIN, growing)
    assert "vLLM" not in frameworks_set_to_grow(SERVE, growing), "a setting counts for its own framework"
    assert "vLLM" in frameworks_set_to_grow((*SERVE, "--gpu-memory-utilization=0.3"), {})
    assert "JAX" not in frameworks_set_to_grow(TRAIN, {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"})


@pytest.mark.parametrize(
    ("text", "environment"),
    [
        (JAX, {"XLA_PYTHON_CLIENT_PREALLOCATE": "False"}), (JAX, {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}),
        (JAX, {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".9"}), (JAX, {"XLA_CLIENT_MEM_FRACTION": "0.9"}),
        (TENSORFLOW, {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}),
    ],
)  # fmt: skip
def test_a_variable_that_the_user_has_set_silences_the_advice(text: str, environment: dict[str, str]) -> None:
    assert advice(TRAIN, text, 0.95, environment) is None


@pytest.mark.parametrize("words", [("--gpu-memory-utilization", "0.9"), ("--gpu_memory_utilization=0.9",)])
def test_a_flag_that_the_user_has_given_silences_the_advice(words: tuple[str, ...]) -> None:
    assert advice((*SERVE, *words), "", 0.9) is None


def test_frameworks_that_the_user_has_not_configured_are_kept_from_preallocating() -> None:
    jax, tensorflow = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    assert growth_variables({"PATH": "/bin"}) == {**jax, **tensorflow}
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR"):
        assert growth_variables({name: ""}) == tensorflow
    assert growth_variables({"TF_FORCE_GPU_ALLOW_GROWTH": "false"}) == jax


@pytest.mark.parametrize(
    ("curve", "jumped"),
    [
        pytest.param([(3.1, 18_500.0)], True, id="within the first sample"),
        pytest.param([(3.1, 450.0), (4.1, 18_500.0), (5.1, 18_500.0)], True, id="from its context"),
        pytest.param([(3.1, 450.0), (4.1, 9000.0), (5.1, 18_500.0)], False, id="in steps"),
        pytest.param([(3.1, 450.0), (9.1, 18_500.0)], False, id="no sample was taken meanwhile"),
        pytest.param([(3.1, 450.0), (4.1, 16_000.0)], False, id="too little"),
        pytest.param([], False, id="nothing"),
    ],
)
def test_a_program_that_preallocates_is_known_by_one_jump(curve: list[tuple[float, float]], jumped: bool) -> None:
    assert has_jumped(curve, CARD_MB) is jumped
