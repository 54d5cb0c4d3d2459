"""Decide whether a failed program ran out of memory, from the end of its output and its exit status.

1. Only the last 200 lines count. The last line that matches a pattern is the cause; the first pattern that matches it
   counts. Where it has no numbers, those of a matching line shortly before it are used. A line about what might happen
   ("if you get CUDA out of memory …") does not count.
2. It does not count if a traceback that starts after it ends in a plainly different error: a mistake in the program
   (ValueError, KeyError, …), a missing file, a KeyboardInterrupt. A RuntimeError or an unknown error does not overrule
   it, as launchers, worker pools and sibling ranks report a death with these.
3. Any such traceback overrules a notice (an allocator that retries with less), unless it ends in an error that is known
   to follow from a full device. A traceback that Python chains to the previous one is a consequence; one that was
   ignored, or ended only a thread, did not end the program.

When in doubt the program ran out of memory: another run with more memory costs a run, and no other run costs the job.
Every pattern takes time linear in the line. Left out on purpose, as more memory would not help or the cause is unclear:
Triton's shared memory, Java's and JavaScript's heaps, full disks, `/dev/shm`, and "not initialized".
"""

import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from math import prod

from msgspec import Struct

from gpuyard.model.lazy_pattern import LazyPattern
from gpuyard.model.terminal_line import without_prefix

KILLED = 137  # 128 and SIGKILL

_COLOUR = LazyPattern(r"\x1b\[[0-9;]{0,20}m")
_TRACEBACK = "Traceback (most recent call last):"
_NO_NEW_FAILURE = (
    "During handling of the above exception",
    "was the direct cause of the following exception",
    "Exception ignored in",
    "Exception in thread",
    "--- Logging error ---",
)
_ERROR = LazyPattern(r"([A-Za-z_][\w.]{0,200})(?:: |:?\s*$)")
_OTHER_ERRORS = frozenset({
    "ArithmeticError", "AssertionError", "AttributeError", "FileExistsError", "FileNotFoundError", "FloatingPointError",
    "ImportError", "IndentationError", "IndexError", "IsADirectoryError", "JSONDecodeError", "KeyError",
    "KeyboardInterrupt", "ModuleNotFoundError", "NameError", "NotADirectoryError", "NotImplementedError",
    "OverflowError", "PermissionError", "RecursionError", "SyntaxError", "TypeError", "UnboundLocalError",
    "UnicodeDecodeError", "UnicodeEncodeError", "UnpicklingError", "ValueError", "ZeroDivisionError",
})  # fmt: skip

# Numbers: each library words them differently, and most give only some. Sizes are in bytes or in units of 1,024,
# whatever the unit is called; that is what all of these libraries mean by it.
_NUMBER = r"(\d{1,3}(?:,\d{3}){1,6}|\d{1,20}(?:\.\d{1,9})?)"
_SIZE = _NUMBER + r"\s?(bytes|[KMGTP]i?B?|B)(?![a-z])"
_MB_PER_UNIT = {"B": 2.0**-20, "K": 2.0**-10, "M": 1.0, "G": 2.0**10, "T": 2.0**20, "P": 2.0**30}
# A petabyte or more is an overflow, or a mistake in a shape: no card has it, and no need should grow to it.
_ABSURD_MB = 2.0**30


def _patterns(*texts: str) -> tuple[LazyPattern, ...]:
    return tuple(LazyPattern(text, re.IGNORECASE | re.ASCII) for text in texts)


_ASKED = _patterns(
    rf"\b(?:alloc|allocate|allocating|calloc|request for|allocation of)\s{_SIZE}",
    r"\bof size (\d{1,20})(?![\d.])()",
    rf"\bmemory utilization \([\d.]{{1,9}}, {_SIZE}",
)
_FREE = _patterns(
    rf"\bof which {_SIZE} is free\b",
    rf"; {_SIZE} free\b",
    rf"\bavailable memory is only {_SIZE}",
    rf"\bon device [^(]{{0,20}}\({_NUMBER}/[\d.]{{1,12}} (GiB)\)",
)
_TOTAL = _patterns(
    rf"\btotal capac[a-z]{{0,3}}ty of {_SIZE}",  # PyTorch wrote "capacty" for years
    rf"\b{_SIZE} total capacity\b",
    rf"\bmax allowed: {_SIZE}",
    rf"\bon device [^(]{{0,20}}\([\d.]{{1,12}}/{_NUMBER} (GiB)\)",
)
_HELD = _patterns(
    rf"\bthis process has {_SIZE} memory in use\b",
    rf"; {_SIZE} reserved in total\b",
    rf"; {_SIZE} already allocated\b",
    rf"\bMPS allocated: {_SIZE}",
    rf"\ballocated so far: {_SIZE}",
    rf"\(total {_SIZE}\)",
)
_HELD_IN_PARTS = _patterns(
    rf"\b{_SIZE} is allocated by PyTorch, and {_SIZE} is reserved by PyTorch but unallocated\b",
)[0]
_INDEX = _patterns(
    r"\bGPU[ :_](\d{1,3})(?!\d)",
    r"\bdevice (?:ordinal )?(\d{1,3})(?![\d.])",
    r"\b(?:cuda|hip|xpu):(\d{1,3})(?!\d)",
    r"\b(?:CUDA|ROCm|Vulkan|SYCL)(\d{1,2}) buffer\b",
)
_TENSOR = LazyPattern(r"\bshape ?\[([\d,]{1,200})\] and type (\w{1,20})", re.ASCII)
_BYTES_PER_TYPE = {
    "bool": 1, "int8": 1, "uint8": 1, "half": 2, "bfloat16": 2, "int16": 2, "uint16": 2, "float": 4, "int32": 4,
    "uint32": 4, "double": 8, "int64": 8, "uint64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


_ALLOC_FAILED = r"(?:STATUS_)?(?:INTERNAL_ERROR_\w{0,20})?ALLOC(?:ATION)?_FAILED\b"
# Every match contains one of these, and hardly any other line does: searching for them is a hundred times cheaper.
_HINTS = (
    "out of", "outof", "out_of", "alloc", "exhausted", "memoryerror", "memory_error", "no available memory",
    "not enough memory", "less than desired", "low on memory", "errno 12", "oom_kill", "oom-kill", "killed by",
    "not initialized", "batch size found",
)  # fmt: skip
# Case-sensitive, as "May" is in the dates of logs.
_ADVICE = LazyPattern(r"\b(?:[Ii]f|[Aa]void\w{0,3}|[Pp]revent\w{0,3}|[Ii]n case|may|might|such as|e\.g\.)(?=[\s,:])")
# Errors that a full device often, but not always, causes. After a notice, one of them confirms it.
_CONSEQUENCES = LazyPattern(
    r"\bCU(?:BLAS|DNN|SOLVER)_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR|EXECUTION_FAILED)\b"
    r"|\bDNN library initialization failed\b"
    r"|\bFailed to (?:load model|create llama_context)\b|\bvalidation error for Llama"
)


class OomPattern(Struct, frozen=True):
    framework: str | None
    regex: LazyPattern
    is_host: bool = False
    is_notice: bool = False


def _find(line: str) -> tuple[OomPattern, int] | None:
    """Return the pattern, and where in the line it matches; None if the line reports no shortage."""
    lowered = line.lower()
    if not any(hint in lowered for hint in _HINTS):
        return None
    for candidate in _PATTERNS:
        match = candidate.regex.search(line)
        if match is not None:
            return None if _ADVICE.search(line, 0, match.start()) else (candidate, match.start())
    return None


def _device(framework: str | None, *patterns: str, is_notice: bool = False) -> OomPattern:
    return OomPattern(framework, LazyPattern("|".join(patterns), re.IGNORECASE), is_notice=is_notice)


def _host(framework: str, *patterns: str) -> OomPattern:
    return OomPattern(framework, LazyPattern("|".join(patterns)), is_host=True)


_PATTERNS = (
    # Frameworks, which write the most informative errors
    _device(
        "PyTorch",
        r"\b(?:CUDA|HIP|XPU|MPS backend) out of memory\b.{0,200}\bTried to allocate\b",
        r"\btorch\.(?:cuda\.)?OutOfMemoryError: \S",
        r"\bNo executable batch size found, reached zero\b",  # Accelerate, after its last attempt
    ),
    _host("TensorFlow", r"\bOOM when allocating tensor\b.{0,300}\bdevice:CPU:"),
    _device("TensorFlow", r"\bran out of memory trying to allocate\b(?!.{0,200}not a failure)", is_notice=True),
    _device(
        "TensorFlow",
        r"\bOOM when allocating tensor\b",
        r"\bResourceExhaustedError: (?!.{0,300}(?:No space left|Disk quota))",
        r"(?<!org_)\btensorflow/core/.{0,200}\bRESOURCE_EXHAUSTED: failed to allocate\b",
        r"\bDst tensor is not initialized\b",  # a copy to a full device
    ),
    _device(
        "JAX",
        r"\bRESOURCE[_ ]EXHAUSTED: .{0,80}\b(?:Out of memory|Ran out of memory|Failed to allocate|"
        r"CUDA_ERROR_OUT_OF_MEMORY)",
        r"\b(?:Xla|Jax)RuntimeError: \w{1,30}: Failed to allocate\b",
    ),
    _device(
        "XLA",  # used by TensorFlow and JAX, which then request less
        r"\bfailed to alloc(?:ate)?\b.{0,80}\b(?:CUDA_ERROR_OUT_OF_MEMORY|HIP_ERROR_OutOfMemory|hipErrorOutOfMemory)\b",
        is_notice=True,
    ),
    _device(
        "CuPy",
        r"\bcupy[\w.]{0,40}OutOfMemoryError: ",
        r"\bout of memory allocating [\d,]{1,30} bytes \(allocated so far",
        r"\bout of memory to allocate \d{1,30} bytes \(total",
    ),
    _device("Numba", r"\bCall to \w{1,40} results in (?:UNKNOWN_)?CUDA_ERROR_OUT_OF_MEMORY\b"),
    _device("RMM", r"\bbad_alloc: out_of_memory\b", r"\bRMM_ERROR_OUT_OF_MEMORY\b"),
    _device(
        "vLLM",
        r"\bNo available memory for the cache blocks\b",
        r"\bFree memory on device\b.{0,80}\bis less than desired GPU memory utilization\b",
    ),
    _device("SGLang", r"\bNot enough memory\. Please try to increase --mem-fraction-static"),
    _device("ONNX Runtime", r"\bBFCArena::AllocateRawInternal\b.{0,300}\bFailed to allocate memory\b"),
    _device(
        "llama.cpp",
        r"\bggml_\w{1,60}: .{0,80}\bfailed: out of memory\b",
        r"\b(?:failed|unable) to allocate (?:CUDA|ROCm|Vulkan|SYCL|Metal)\d{0,2} buffer\b",
        is_notice=True,
    ),
    _device("PaddlePaddle", r"\bOut of memory error on GPU \d"),
    _device("TensorRT", r"\bCuda Runtime \(out of memory\)", r"\bError Code 2: OutOfMemory\b", is_notice=True),
    _device("CUDA.jl", r"\bOut of GPU memory trying to allocate\b"),
    _device("Dr.Jit", r"\b(?:jit|cuda)_malloc\(\): out of memory"),
    _device(
        "Blender",
        r"\bSystem is out of GPU (?:and shared host )?memory\b",
        r"\bOut of memory in (?:cu|hip|optix|ze|mtl)[A-Za-z_]",
    ),
    # Libraries and drivers
    _device("NCCL", r"\bNCCL WARN\b.{0,80}(?:\bout of memory\b|\bFailed to CUDA \w?alloc\b)"),
    _device("cuBLAS", rf"\bCUBLAS_{_ALLOC_FAILED}"),
    _device("cuDNN", rf"\bCUDNN_{_ALLOC_FAILED}"),
    _device("HIP", rf"\b(?:HIPBLAS|HIPFFT|MIOPEN)_{_ALLOC_FAILED}", r"\brocblas_status_memory_error\b"),
    _device(
        "HIP",
        r"\bhipErrorOutOfMemory\b",
        r"\bhipErrorMemoryAllocation\b",
        r"\bHIP_ERROR_OutOfMemory\b",
        r"\bHIP error\b[\s:,'\"(2)]{0,8}out of memory\b",
        r"\bHSA_STATUS_ERROR_OUT_OF_RESOURCES\b",
    ),
    _device("OptiX", r"\bOPTIX_ERROR_(?:DEVICE_OUT_OF_MEMORY|MEMORY_ALLOCATION_FAILED)\b"),
    _device(
        "CUDA",
        rf"\bCU(?:SOLVER|SPARSE|FFT|RAND)_{_ALLOC_FAILED}",
        r"\bCUDA_ERROR_OUT_OF_MEMORY\b",
        # PyTorch adds a line with this name that refers to the documentation.
        r"(?<!Search for .)\bcudaErrorMemoryAllocation\b",
        r"\bcudaMalloc\w{0,20}\b.{0,80}\bout of memory\b",
        r"\bcuda (?:\w{1,20} ){0,3}(?:error|failure)(?: string| code)?[\s:,'\"(2)]{0,8}out of memory\b",
        r"\bGpu API call\) out of memory\b",
    ),
    _host("Vulkan", r"\b(?:VK_ERROR_OUT_OF_HOST_MEMORY|ErrorOutOfHostMemory)\b"),
    _device("Vulkan", r"\b(?:VK_ERROR_OUT_OF_DEVICE_MEMORY|ErrorOutOfDeviceMemory)\b"),
    _device("OpenGL", r"\bGL_OUT_OF_MEMORY\b"),
    _device("OpenCL", r"\bCL_MEM_OBJECT_ALLOCATION_FAILURE\b"),
    _device("oneAPI", r"\b(?:UR|ZE)_RESULT_ERROR_OUT_OF_DEVICE_MEMORY\b"),
    _device("Metal", r"\bkIOGPUCommandBufferCallbackErrorOutOfMemory\b"),
    _device(
        None,  # an error message of the program's own
        r"^(?:[\w.]{0,80}(?:Error|Exception)|\s{0,8}what\(\)): {1,4}.{0,120}?"
        r"(?:\b(?:CUDA|GPU|HIP)\b.{0,40}\bout of memory\b|\bout of (?:CUDA|GPU|HIP|device|video) memory\b)",
    ),
    # The host
    _host("PyTorch", r"\bDefaultCPUAllocator: (?:can't allocate|not enough) memory\b"),
    _host("PyTorch", r"\bDataLoader worker \(pid(?:\(s\))? [\d, ]{1,80}\) is killed by signal: Killed\b"),
    _host("Ray", r"\bray\.exceptions\.OutOfMemoryError\b", r"\bkilled due to the node running low on memory\b"),
    _host("NumPy", r"^numpy[\w.]{0,40}MemoryError\b", r"\b_ArrayMemoryError: "),
    _host("Python", r"^(?:[\w.]{0,80}\.)?MemoryError(?:: |\s*$)", r"\[Errno 12\]"),
    _host("C++", r"\bstd::bad_alloc\b"),
    _host("Rust", r"\bmemory allocation of \d{1,20} bytes failed\b"),
    _host("the kernel", r"\bDetected \d{1,9} oom[-_]kill event"),
    _host("the system", r"\b[Cc]annot allocate memory\b(?! in static TLS)"),
)


class ShortageKind(StrEnum):
    DEVICE = "device"
    HOST = "host"


class Shortage(Struct, frozen=True, kw_only=True):
    """What ran out: the error line (`says`) and its numbers; None where it gives none."""

    where: ShortageKind
    says: str
    asked_mb: float | None = None
    free_mb: float | None = None
    total_mb: float | None = None
    held_mb: float | None = None  # the memory that the program itself held at that moment
    device_index: int | None = None
    framework: str | None = None


class RamLimit(Struct, frozen=True, kw_only=True):
    """The limit of RAM of an attempt, how many of its processes the kernel ended at it, and its peak."""

    limit_mb: float | None
    kills: int = 0
    peak_mb: float | None = None


def recognise(text: str) -> Shortage | None:
    """Return the shortage that the end of a failed program's output reports, or None."""
    last = text[-(1 << 17) :].splitlines()[-200:]
    lines = [without_prefix(_COLOUR.sub("", line)) for line in last]
    for at in range(len(lines) - 1, -1, -1):
        found = _find(lines[at])
        if found is None:
            continue
        pattern, place = found
        if any(_overrules(error, pattern) for error in _errors_after(lines, at)):
            return None
        # Where the line does not say how much was requested, a matching line before it that does.
        nearby = (lines[at], *reversed(lines[max(0, at - 19) : at]))
        asked = (line for line in nearby if _asked_mb(line) is not None and _is_alike(line, pattern))
        numbers = next(asked, lines[at])
        index = _first(_INDEX, numbers)
        # The line, printable and shortened around the match.
        start = max(0, place - 80) if len(lines[at]) > 300 else 0
        says = "".join(char if char.isprintable() else " " for char in lines[at][start : start + 600])
        says = " ".join(says.split())
        return Shortage(
            where=ShortageKind.HOST if pattern.is_host else ShortageKind.DEVICE,
            says=says if len(says) <= 300 else f"{says[:299]}…",
            asked_mb=_asked_mb(numbers),
            free_mb=_first_size(_FREE, numbers),
            total_mb=_first_size(_TOTAL, numbers),
            held_mb=_held_mb(numbers),
            device_index=None if index is None else int(index[1]),
            framework=pattern.framework,
        )
    return None


def killed_by_kernel(
    status: int | None,
    kills_before: int | None,
    kills_after: int | None,
    ram_peak_mb: float | None,
    ram_total_mb: float | None,
) -> Shortage | None:
    """Return the shortage behind a SIGKILL that we did not send, or None without evidence: the kernel's count of
    out-of-memory kills, or a program that held nearly all RAM, as the count lacks kills by systemd-oomd."""
    if status != KILLED:
        return None
    is_counted = kills_before is not None and kills_after is not None and kills_after > kills_before
    is_full = ram_peak_mb is not None and bool(ram_total_mb) and ram_peak_mb >= 0.9 * (ram_total_mb or 0.0)
    if not is_counted and not is_full:
        return None
    why = "the kernel's out-of-memory killer ended it" if is_counted else "it was killed when it held nearly all memory"
    return Shortage(
        where=ShortageKind.HOST, says=why, held_mb=ram_peak_mb, total_mb=ram_total_mb, framework="the kernel"
    )


def ended_at_limit(limit: RamLimit | None) -> Shortage | None:
    """Return the shortage of an attempt that the kernel ended at its own limit of RAM, if it did."""
    if limit is None or not limit.kills:
        return None
    says = "the kernel ended it at its limit of RAM (--ram), out of memory"
    return Shortage(
        where=ShortageKind.HOST, says=says, held_mb=limit.peak_mb, total_mb=limit.limit_mb, framework="the kernel"
    )


def _errors_after(lines: Sequence[str], at: int) -> Iterator[str]:
    """Yield the error lines of tracebacks that start after the line `at` and are failures of their own."""
    for header in range(at + 1, len(lines)):
        if _TRACEBACK not in lines[header]:
            continue
        before = next((line for line in reversed(lines[:header]) if line.strip()), "")
        error = next((line for line in lines[header + 1 :] if line and not line[0].isspace()), None)
        if error is not None and not any(sentence in before for sentence in _NO_NEW_FAILURE):
            yield error


def _overrules(error: str, pattern: OomPattern) -> bool:
    match = _ERROR.match(error)
    if match is None:
        return False
    if pattern.is_notice:
        return not _CONSEQUENCES.search(error)
    return match[1].rpartition(".")[2] in _OTHER_ERRORS


def _is_alike(line: str, pattern: OomPattern) -> bool:
    found = _find(line)
    return found is not None and found[0].is_host == pattern.is_host


def _first(patterns: Sequence[LazyPattern], line: str) -> re.Match[str] | None:
    return next((match for pattern in patterns if (match := pattern.search(line)) is not None), None)


def _first_size(patterns: Sequence[LazyPattern], line: str) -> float | None:
    match = _first(patterns, line)
    return None if match is None else _megabytes(match[1], match[2])


def _held_mb(line: str) -> float | None:
    held = _first_size(_HELD, line)
    match = _HELD_IN_PARTS.search(line)
    if held is not None or match is None:
        return held
    return (_megabytes(match[1], match[2]) or 0.0) + (_megabytes(match[3], match[4]) or 0.0)


def _asked_mb(line: str) -> float | None:
    asked_mb, match = _first_size(_ASKED, line), _TENSOR.search(line)
    if asked_mb:
        return asked_mb
    each = _BYTES_PER_TYPE.get(match[2]) if match is not None else None
    if match is None or each is None:
        return None
    # TensorFlow names the shape of the tensor in place of a size.
    whole = prod(int(side) for side in match[1].split(",") if side) * each
    return whole / 2**20 if whole < _ABSURD_MB * 2**20 else None


def _megabytes(number: str, unit: str) -> float | None:
    megabytes = float(number.replace(",", "")) * _MB_PER_UNIT[(unit or "B")[0].upper()]
    return megabytes if megabytes < _ABSURD_MB else None
