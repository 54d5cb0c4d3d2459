"""Random batches in a world with changing foreign load, in which daemons are killed."""

from random import Random
from typing import Any

from gpuyard.model.submission import SubmissionRequest
from tests.simulation.behaviors import Behavior, BehaviorOf, random_behavior
from tests.simulation.clients import Operation, operations
from tests.simulation.scenario import WITHIN_S, Script
from tests.simulation.world import RAM_MB, LoadSpike

RUN = "sim"
FIGURES = ("cpu", "ram", "gpu")


def random_batches(seed: int) -> Script:
    random = Random(f"{seed} batches")
    batches = [_batch(random, number) for number in range(random.randint(1, 3))]
    others = operations(seed, 2 + seed % 5, WITHIN_S)
    return Script(
        seed=seed,
        operations=tuple(sorted([*batches, *others], key=lambda operation: operation.at)),
        others=seed % 3,
        trouble=0.06 if seed % 4 == 0 else 0.0,
        devices=seed % 3,
        measures_every_s=3.0,
        shares_first_runs=seed % 7 >= 3,
        load_spikes=tuple(_load_spike(random) for _ in range(random.randint(0, 5))),
        blind=frozenset(random.sample(FIGURES, random.choice((0, 0, 0, 1, 2)))),
    )


def paced_behavior(seed: int) -> BehaviorOf:
    """Return behaviors in which runs of batches take about what they declared; those of other jobs are random."""
    random_script = random_behavior(seed)

    def behavior(command: tuple[str, ...], attempt: int) -> Behavior:
        if command[0] != RUN:
            return random_script(command, attempt)
        random = Random(f"{seed} {command} {attempt}")
        _, _, _, vram_mb, ram_mb = command
        return Behavior(
            runs_s=random.choice((0.0, random.uniform(0.0, 1.0), random.uniform(2.0, 12.0))),
            exit_status=random.choices(("0", "1", "139"), (88, 10, 2))[0],
            lost_after_s=random.uniform(0.0, 2.0) if random.random() < 0.03 else None,
            climbs=((random.uniform(0.0, 2.0), float(vram_mb) * random.uniform(0.5, 1.0)),),
            cpu_percent=random.choice((0.0, 8.0, 25.0)),
            gpu_percent=random.choice((0.0, 10.0, 40.0)),
            ram_mb=float(ram_mb) * random.uniform(0.6, 1.0),
            ram_after_s=random.choice((0.0, random.uniform(0.0, 4.0))),
        )

    return behavior


def batch(at: float, token: str, count: int, *, vram_mb: int = 0, ram_mb: int = 0, **options: Any) -> Operation:
    """Submit `count` runs that take `vram_mb` of a device and `ram_mb` of RAM, and declare both unless they are 0."""
    typed = {name.replace("_", "-"): str(value) for name, value in options.items()}
    declared = {"vram": f"{vram_mb}M"} if vram_mb else {}
    declared |= {"run-ram": f"{ram_mb}M"} if ram_mb else {}
    request = SubmissionRequest(
        cwd="/",
        environment={},
        token=token,
        command=(RUN, token, "{index}", str(vram_mb), str(ram_mb)),
        options={"name": token, "sweep": [f"index=0-{count - 1}"], **declared, **typed},
    )
    return Operation(at=at, kind="submit", asked=request)


def _batch(random: Random, number: int) -> Operation:
    bounds: dict[str, Any] = {
        "max-cpu": random.randint(40, 90),
        "min-free-mem-mb": random.choice((2048, 20_000, 40_000)),
        "max-gpu": random.randint(30, 90),
        "max-gpu-mem-mb": random.choice((6000, 9000, 16_000)),
        "stagger": f"{random.choice((0.5, 1, 3))}s",
        "smoothing": f"{random.choice((0, 1, 5))}s",
        "steady": f"{random.choice((0, 2, 4))}s",
        "retries": random.randint(0, 2),
        "priority": random.randint(-1, 2),
        "on-reboot": "requeue",
    }
    chosen = {name: value for name, value in bounds.items() if random.random() < 0.6}
    return batch(
        random.choice((0.0, random.uniform(0.0, 10.0))),
        f"b{number}",
        random.randint(2, 8),
        vram_mb=random.choice((0, 1500, 4000)),
        ram_mb=random.choice((0, 3000, 15_000)),
        concurrency=random.randint(1, 5),
        **chosen,
    )


def _load_spike(random: Random) -> LoadSpike:
    return LoadSpike(
        at=random.uniform(0.0, WITHIN_S),
        lasts_s=random.uniform(0.5, 15.0),
        cpu_percent=random.choice((0.0, 30.0, 90.0)),
        gpu_percent=random.choice((0.0, 30.0, 90.0)),
        ram_mb=random.choice((0.0, 0.3 * RAM_MB, 0.9 * RAM_MB)),
    )
