"""Faults on files: removed and garbled ones. ADR 52 says which removals gpuyard promises to survive."""

import contextlib
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

from gpuyard.system.file_locks import try_hold
from tests.torture.faults import NOTHING, Fault


class Remove(Fault):
    """Remove files once."""

    def begin(self) -> str:
        gone = []
        for path in self.paths():
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                gone.append(path.name)
        return f"{len(gone)}: {' '.join(gone[:3])}" if gone else NOTHING

    def paths(self) -> Iterator[Path]:
        raise NotImplementedError


class RemoveQueueLeases(Remove):
    """Leases of the queue, which it makes anew. Those of scripts are only theirs: no other process knows them."""

    def begin(self) -> str:
        self.target.happened.removed_leases.append(time.monotonic())
        return super().begin()

    def paths(self) -> Iterator[Path]:
        for path in self.target.ledger.glob("*.lease"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                if json.loads(path.read_bytes())["holder"]["label"].startswith("job "):
                    yield path


class RemoveTickets(Remove):
    def paths(self) -> Iterator[Path]:
        return self.target.ledger.glob("*.ticket")


class RemoveFiles(Remove):
    def __init__(self, *arguments: object, names: tuple[str, ...]) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._names = names

    def paths(self) -> Iterator[Path]:
        return (self.target.home / name for name in self._names)


class RemoveFinishedLogs(Remove):
    """Logs of a few attempts that have ended."""

    def paths(self) -> Iterator[Path]:
        ended = [line.split()[1] for line in self.target.evidence.lines() if line.startswith("end ")]
        for run in random.Random(self.pick).sample(ended, min(3, len(ended))):
            self.target.happened.removed_logs.add(f"{run}.log")
            yield self.target.logs / f"{run}.log"


class GarbageRecords(Fault):
    """Locked files in the ledger that hold no proper record: any bytes, and halves of real records."""

    lasts = (2.0, 10.0)

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._held: list[tuple[int, Path]] = []

    def begin(self) -> str:
        dice = random.Random(self.pick)
        real = [path.read_bytes() for path in self.target.ledger.glob("*.lease")]
        contents = [
            b"", b"{", dice.randbytes(300), b'{"pid": -5}', b"[" * 5000,
            *(content[: dice.randrange(len(content))] for content in real[:2] if content),
            *(content.replace(b'"pid":', b'"pid":-') for content in real[:1]),
        ]  # fmt: skip
        with contextlib.suppress(OSError):  # no room
            for number, content in enumerate(contents):
                path = self.target.ledger / f"{number}-garbage{dice.choice(['.lease', '.ticket'])}"
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                self._held.append((descriptor, path))
                try_hold(descriptor)
                os.write(descriptor, content)
        return f"{len(self._held)} files"

    def end(self) -> None:
        for descriptor, path in self._held:
            path.unlink(missing_ok=True)
            os.close(descriptor)
