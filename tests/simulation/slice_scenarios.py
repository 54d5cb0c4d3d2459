"""Random arrays of short jobs that run in slices, beside everything else that happens to a queue."""

from random import Random
from typing import Any

from gpuyard.model.submission import SubmissionRequest
from tests.simulation.behaviors import Behavior, BehaviorOf, random_behavior
from tests.simulation.clients import Operation
from tests.simulation.keeper import KeeperHabits
from tests.simulation.scenario import Script

SHORT = "short"
WITHIN_S = 1.2
KINDS = {
    "array": 50, "submit": 2, "dependant": 8, "urgent": 6, "suspend": 6, "resume": 4, "cancel": 5, "hold": 5,
    "release": 4, "priority": 6, "retry": 3, "edit": 5, "pause": 4, "unpause": 5, "drain": 4, "undrain": 4,
    "stop_tag": 4, "start_tag": 4, "limits": 5, "foreign": 5, "kill": 3, "reboot": 1, "kill_keeper": 2,
    "stop_keeper": 5, "why": 2,
}  # fmt: skip


def random_slices(seed: int) -> Script:
    random = Random(f"{seed} follows")
    count = 4 + seed % 7
    times = sorted(random.choice((0.0, random.uniform(0.0, WITHIN_S))) for _ in range(count))
    kinds = ["array", *random.choices(list(KINDS), list(KINDS.values()), k=count - 1)]
    operations = [
        _operation(seed, at, kind, number) for number, (at, kind) in enumerate(zip(times, kinds, strict=True))
    ]
    operations.append(Operation(at=WITHIN_S + 0.3, kind="why"))  # what was ordered lasts until then
    is_wild = seed % 3 == 0
    return Script(
        seed=seed,
        operations=tuple(operations),
        others=seed % 2 if seed % 3 and seed % 4 else 0,
        trouble=0.03 if seed % 5 == 0 else 0.0,
        devices=seed % 3,
        measures_every_s=1.0,
        within_s=WITHIN_S,
        late_samples=0.3 if seed % 4 == 1 else 0.0,
        late_reads=0.3 if seed % 3 else 0.0,
        habits=KeeperHabits(
            stops=0.05 if is_wild else 0.0,
            stops_s=random.choice((0.05, 0.5, 3.0)),
            trouble=0.02 if seed % 5 == 0 else 0.0,
            reports_in_parts=0.2 if is_wild else 0.0,
        ),
    )


def short_behavior(seed: int) -> BehaviorOf:
    """Return behaviors in which the jobs of an array take about the same short time; those of other jobs are random."""
    wild = random_behavior(seed)

    def behavior(command: tuple[str, ...], attempt: int) -> Behavior:
        if command[0] != SHORT:
            return wild(command, attempt)
        of_array = Random(f"{seed} {command[1]}")
        usual_s, long = of_array.choice((0.004, 0.02, 0.06, 0.06)), of_array.choice((0, 2, 15))
        random = Random(f"{seed} {command} {attempt}")
        runs_s = random.choices((usual_s, random.uniform(0.5, 2.0) * usual_s, 0.5), (70, 28, long))[0]
        return Behavior(
            runs_s=runs_s,
            exit_status=random.choices(("0", "1", "no-program"), (96, 3, 1))[0],
            heeds_term=random.random() < 0.9,
            lost_after_s=random.uniform(0.0, runs_s) if random.random() < 0.01 else None,
            lingers_s=random.uniform(0.0, 0.1) if random.random() < 0.02 else 0.0,
            climbs=((0.3 * runs_s, 700.0),) if random.random() < 0.5 else (),
            ends_suspended=random.random() < 0.5,
        )

    return behavior


def array(at: float, token: str, count: int, **options: Any) -> Operation:
    """Submit an array of short jobs."""
    typed = {name.replace("_", "-"): str(value) for name, value in options.items()}
    request = SubmissionRequest(
        cwd="/",
        environment={},
        token=token,
        command=(SHORT, token, "{index}"),
        options={"name": token, "array": f"0-{count - 1}", **typed},
    )
    return Operation(at=at, kind="submit", asked=request)


def _operation(seed: int, at: float, kind: str, number: int) -> Operation:
    """Return an operation. Many arrays have the same options, so that they compete."""
    random, token = Random(f"{seed} follows {number}"), f"s{number}"
    options = _options(random.choice((random, *[Random(f"{seed} options")] * 3)))
    if kind == "array":
        return array(at, token, random.randint(6, 50), **options)
    if kind == "dependant":  # of an early job, while later ones of its array still wait
        after = {"after_any": random.randint(1, 12), "priority": random.choice((0, 3))}
        return array(at, token, random.randint(1, 3), **options | after)
    if kind == "urgent":
        return array(at, token, random.randint(1, 4), **options | {"priority": 5})
    return Operation(at=at, kind=kind, number=number)


def _options(random: Random) -> dict[str, Any]:
    options: dict[str, Any] = {"gpus": random.choice((0, 0, 1, 1, 1))}
    if options["gpus"]:
        options |= random.choice(({}, {"vram": "4G"}, {"vram": "9G"}, {"exclusive": True}))
        options |= random.choice(({}, {}, {"on_preempt": "requeue"}))
    chances: tuple[tuple[float, str, Any], ...] = (
        (0.3, "priority", random.randint(-1, 2)),
        (0.2, "retries", 1),
        (0.2, "time_limit", "1s"),
        (0.1, "duration", "1s"),
        (0.3, "tag", random.choice(("night", "day", "day"))),
        (0.3, "grace", "0s"),
        (0.1, "on_reboot", "hold"),
    )
    return options | {name: value for chance, name, value in chances if random.random() < chance}
