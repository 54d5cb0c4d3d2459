"""What `gpuyard doctor` says about the speed of suspending: huge pages, and the right to allocate memory ahead."""

from collections.abc import Sequence
from pathlib import Path

from gpuyard.core.snapshot import Vendor
from gpuyard.probes.fallback_chain import Checkup

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_CHILDREN_ONLY = 1


def suspend_notices(
    checks: Sequence[Checkup], huge_pages: Path = _HUGE_PAGES, ptrace_scope: Path = _PTRACE_SCOPE
) -> list[str]:
    """Return what would make suspending faster here. Nothing without an NVIDIA GPU: only its driver suspends
    programs."""
    if not any(check.vendor is Vendor.NVIDIA and check.devices for check in checks):
        return []
    return [*_huge_page_notices(_read(huge_pages)), *_ptrace_notices(_read(ptrace_scope))]


def _huge_page_notices(text: str | None) -> list[str]:
    """`text` is such as `always [madvise] never`, with the present choice in brackets."""
    chosen = "" if text is None else text.partition("[")[2].partition("]")[0]
    if chosen not in ("madvise", "never"):
        return []
    notice = (
        f"transparent huge pages are set to {chosen}: the driver moves GPU memory to RAM in small pages when a job is "
        "suspended, 20 GB in 9.8 to 13.7 s instead of 6.7 to 7.5 s (on an H200). "
        f"As root: echo always > {_HUGE_PAGES}"
    )
    return [notice]


def _ptrace_notices(text: str | None) -> list[str]:
    if text is None or not text.isdigit() or int(text) < _CHILDREN_ONLY:
        return []
    notice = (
        f"kernel.yama.ptrace_scope is {text}: gpuyard may not allocate memory for a program that is being suspended, "
        "so the driver does it, more slowly. As root: sysctl kernel.yama.ptrace_scope=0, which also lets each user's "
        "programs debug each other"
    )
    return [notice]


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
