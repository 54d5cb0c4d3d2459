"""Builds the fake libcuda.so.1 and keeps the state that it reads (cuda.c says how)."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

_SOURCE = Path(__file__).with_name("cuda.c")


def build_fake_cuda(folder: Path, old_driver: bool = False) -> Path:
    """Compiles `folder`/libcuda.so.1; that of an old driver cannot move memory."""
    library = folder / "libcuda.so.1"
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{library.name}"]
    if old_driver:
        options += ["-DOLD_DRIVER", "-Wno-unused-function", "-Wno-unused-const-variable"]
    subprocess.run(["cc", *options, "-o", str(library), str(_SOURCE)], check=True)
    return library


@dataclass(frozen=True, kw_only=True)
class FakeCuda:
    """The state, for processes with FAKE_CUDA_STATE in their environment."""

    folder: Path

    def rule(self, *lines: str) -> None:
        """In place of those before, such as `Restore 17 fail 2`."""
        fresh = self.folder / "rules.new"
        fresh.write_text("".join(f"{line}\n" for line in lines))
        fresh.replace(self.folder / "rules")

    def state(self, pid: int) -> str:
        """`running`, `locked` or `checkpointed`."""
        return ("running", "locked", "checkpointed")[int((self.folder / str(pid)).read_text().split()[0])]

    def calls(self) -> list[str]:
        """All that were made, without GetState: function, pid and code."""
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def is_paused_at(self, function: str) -> bool:
        return (self.folder / f"at-{function}").exists()

    def let_go(self, function: str) -> None:
        (self.folder / f"go-{function}").touch()
