"""Build the fake libcuda.so.1 and keep the state that it reads (format: cuda.c)."""

from dataclasses import dataclass
from pathlib import Path

from tests.fakes.compile_library import compile_library

_SOURCE = Path(__file__).with_name("cuda.c")


def build_fake_cuda(folder: Path, old_driver: bool = False) -> Path:
    """Compile `folder`/libcuda.so.1. The library of an old driver cannot move memory."""
    library = folder / "libcuda.so.1"
    options = ["-DOLD_DRIVER", "-Wno-unused-function", "-Wno-unused-const-variable"] if old_driver else []
    return compile_library(_SOURCE, library, f"-Wl,-soname,{library.name}", *options)


@dataclass(frozen=True, kw_only=True)
class FakeCuda:
    """The state of processes with FAKE_CUDA_STATE in their environment."""

    folder: Path

    def rule(self, *lines: str) -> None:
        """Replace the rules, for example by `Restore 17 fail 2`."""
        fresh = self.folder / "rules.new"
        fresh.write_text("".join(f"{line}\n" for line in lines))
        fresh.replace(self.folder / "rules")

    def state(self, pid: int) -> str:
        """Return `running`, `locked` or `checkpointed`."""
        return ("running", "locked", "checkpointed")[int((self.folder / str(pid)).read_text().split()[0])]

    def calls(self) -> list[str]:
        """Return all calls except GetState: function, pid and code."""
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def is_paused_at(self, function: str) -> bool:
        return (self.folder / f"at-{function}").exists()

    def let_go(self, function: str) -> None:
        (self.folder / f"go-{function}").touch()
