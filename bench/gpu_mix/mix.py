"""The programs of the mix, with the size of each. Imports no framework.

The numbers of steps are fixed, so that a program does the same work however many others share its card. `tiny` sizes
run on a CPU within seconds: to try a program out, and to read its libraries into the page cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TRAIN = Path(__file__).with_name("train.py")
# As a user's shell would have it. Without these, results differ from run to run, and JAX takes most of the card.
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "XLA_FLAGS": "--xla_gpu_deterministic_ops=true",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "OMP_NUM_THREADS": "2",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A function in the module `{framework}_programs`. `seeds` are its runs in the mix."""

    name: str
    framework: str
    full: Mapping[str, int]
    tiny: Mapping[str, int]
    seeds: tuple[int, ...] = (0,)
    is_deterministic: bool = True


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """One run of a program."""

    program: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.program}-{self.seed}"

    def arguments(self) -> list[str]:
        return ["--program", self.program, "--seed", str(self.seed)]


PROGRAMS = (
    # Keeps the card busy: its images lie in device memory.
    Program(
        name="convnext",
        framework="torch",
        full={"batch": 96, "pixels": 176, "steps": 45, "images": 384},
        tiny={"batch": 2, "pixels": 32, "steps": 2, "images": 4},
    ),
    # Climbs late: after training, it evaluates with a batch that is 16 times as large.
    Program(
        name="efficientnet",
        framework="torch",
        full={"batch": 64, "pixels": 224, "steps": 60, "eval_batch": 1024, "eval_steps": 4},
        tiny={"batch": 2, "pixels": 32, "steps": 2, "eval_batch": 4, "eval_steps": 1},
    ),
    # The CPU prepares each batch.
    Program(
        name="vit",
        framework="torch",
        full={"batch": 48, "pixels": 224, "width": 768, "layers": 12, "steps": 50},
        tiny={"batch": 2, "pixels": 32, "width": 48, "layers": 1, "steps": 2},
    ),
    # Keeps the card busy: a diffusion model that is trained and then draws samples.
    Program(
        name="unet",
        framework="torch",
        full={"batch": 144, "pixels": 64, "width": 96, "steps": 30, "samples": 20},
        tiny={"batch": 2, "pixels": 16, "width": 16, "steps": 2, "samples": 2},
    ),
    # Begins with seconds of preparation on the CPU.
    Program(
        name="t5",
        framework="transformers",
        full={"documents": 40_000, "rounds": 12, "batch": 32, "tokens": 256, "width": 512, "layers": 6, "steps": 60},
        tiny={"documents": 100, "rounds": 2, "batch": 2, "tokens": 16, "width": 48, "layers": 1, "steps": 2},
        seeds=(0, 1),
    ),
    Program(
        name="distilbert",
        framework="transformers",
        full={"batch": 20, "tokens": 256, "width": 768, "layers": 6, "steps": 60},
        tiny={"batch": 2, "tokens": 16, "width": 48, "layers": 1, "steps": 2},
        seeds=(0, 1),
    ),
    # The largest: the scores of 50,000 words for each token.
    Program(
        name="opt",
        framework="transformers",
        full={"batch": 10, "tokens": 512, "width": 768, "layers": 12, "steps": 50},
        tiny={"batch": 2, "tokens": 16, "width": 48, "layers": 1, "steps": 2},
    ),
    # Its memory grows with each token, as keys and values are kept.
    Program(
        name="mistral",
        framework="transformers",
        full={"batch": 96, "prompt": 128, "tokens": 192, "width": 1536, "layers": 16, "rounds": 2},
        tiny={"batch": 2, "prompt": 8, "tokens": 4, "width": 64, "layers": 1, "rounds": 1},
        seeds=(0, 1),
    ),
    # Loads its data with two worker processes.
    Program(
        name="forecaster",
        framework="lightning",
        full={"batch": 12, "length": 2048, "width": 256, "layers": 10, "steps": 200},
        tiny={"batch": 2, "length": 64, "width": 8, "layers": 2, "steps": 2},
        seeds=(0, 1),
    ),
    Program(
        name="decoder",
        framework="jax",
        full={"batch": 16, "tokens": 512, "width": 768, "layers": 8, "steps": 60},
        tiny={"batch": 2, "tokens": 16, "width": 32, "layers": 2, "steps": 2},
    ),
    Program(
        name="heat",
        framework="jax",
        full={"points": 32_768, "width": 256, "layers": 6, "steps": 220},
        tiny={"points": 64, "width": 16, "layers": 2, "steps": 2},
        seeds=(0, 1),
    ),
    # Keeps the card busy with Fourier transforms.
    Program(
        name="waves",
        framework="cupy",
        full={"side": 384, "steps": 500},
        tiny={"side": 16, "steps": 2},
    ),
    Program(
        name="bodies",
        framework="cupy",
        full={"bodies": 6144, "steps": 500},
        tiny={"bodies": 64, "steps": 2},
    ),
)


def program(name: str) -> Program:
    for each in PROGRAMS:
        if each.name == name:
            return each
    raise SystemExit(f"no program {name}: choose from {', '.join(each.name for each in PROGRAMS)}")


def mix() -> list[Run]:
    """Return the runs in the order of their submission: first seeds first."""
    runs = [Run(each.name, seed) for each in PROGRAMS for seed in each.seeds]
    return sorted(runs, key=lambda run: run.seed)
