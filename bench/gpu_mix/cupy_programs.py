"""Simulations with CuPy: a quantum wave in three dimensions, and bodies that attract each other."""

from collections.abc import Iterator, Mapping

import cupy
import numpy as np


def sees_gpu() -> bool:
    return bool(cupy.is_available())


def peak_mb() -> float:
    """Return the memory of the pool, which keeps all that was ever in use."""
    return float(cupy.get_default_memory_pool().total_bytes()) / 2**20


def waves(size: Mapping[str, int]) -> Iterator[bytes]:
    """Solve the Schrödinger equation by turns in space and in frequencies."""
    side, random = size["side"], np.random.default_rng(size["seed"])
    places = cupy.linspace(-8, 8, side, dtype=cupy.float32)
    square = places[:, None, None] ** 2 + places[None, :, None] ** 2 + places[None, None, :] ** 2
    turn_in_space = cupy.exp(-0.0005j * square).astype(cupy.complex64)
    frequencies = cupy.fft.fftfreq(side, 16 / side).astype(cupy.float32) ** 2
    square = frequencies[:, None, None] + frequencies[None, :, None] + frequencies[None, None, :]
    turn_in_frequency = cupy.exp(-0.02j * square).astype(cupy.complex64)
    centre = random.uniform(-2, 2, 3)
    wave = cupy.ones((side, side, side), dtype=cupy.complex64)
    for axis in range(3):
        shape = [side if each == axis else 1 for each in range(3)]
        wave *= cupy.exp(-((places - float(centre[axis])) ** 2)).reshape(shape)
    for step in range(size["steps"]):
        wave *= turn_in_space
        changed = cupy.fft.fftn(wave)
        changed *= turn_in_frequency
        wave = cupy.fft.ifftn(changed)
        if step % 100 == 0:
            print(f"step {step}: highest {float(cupy.abs(wave[side // 2]).max()):.5f}", flush=True)
    return iter([cupy.asnumpy(wave).tobytes()])


def bodies(size: Mapping[str, int]) -> Iterator[bytes]:
    """Move bodies by their gravity, and keep their path on the host."""
    random = np.random.default_rng(size["seed"])
    place = cupy.asarray(random.normal(0, 1, (3, size["bodies"])).astype(np.float32))
    speed = cupy.asarray(random.normal(0, 0.1, (3, size["bodies"])).astype(np.float32))
    path = []
    for step in range(size["steps"]):
        apart = [axis[None, :] - axis[:, None] for axis in place]
        weight = (apart[0] ** 2 + apart[1] ** 2 + apart[2] ** 2 + 0.01) ** -1.5
        for axis in range(3):
            speed[axis] += 0.001 * (apart[axis] * weight).sum(axis=1) / size["bodies"]
        place += 0.01 * speed
        path.append(cupy.asnumpy(place))
        if step % 100 == 0:
            print(f"step {step}: mean distance {float((place**2).sum(axis=0).mean()):.5f}", flush=True)
    return iter([np.stack(path).tobytes(), cupy.asnumpy(speed).tobytes()])
