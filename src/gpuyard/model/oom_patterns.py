"""Patterns of out-of-memory errors, by the framework that writes them.

- A pattern matches one line of output, and is specific: it names an error, a status or a failed call, never only a
  subject.
- The order matters: the first pattern that matches a line counts. More informative patterns come first.
- A *notice* is what a library writes when one allocation failed. It counts for less, as the library may continue with
  less memory.
- A line about what might happen ("if you get CUDA out of memory …") does not count.
- Every pattern takes time linear in the line: nothing unbounded stands inside something repeated.

Left out on purpose, as more memory would not help or the cause is unclear: Triton's shared memory, Java's and
JavaScript's heaps, full disks, `/dev/shm`, encoder sessions, and libraries that were "not initialized".
"""

import re

from msgspec import Struct

from gpuyard.model.lazy_pattern import LazyPattern

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
CONSEQUENCES = LazyPattern(
    r"\bCU(?:BLAS|DNN|SOLVER)_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR|EXECUTION_FAILED)\b"
    r"|\bDNN library initialization failed\b"
    r"|\bFailed to (?:load model|create llama_context)\b|\bvalidation error for Llama"
)


class OomPattern(Struct, frozen=True):
    framework: str | None
    regex: LazyPattern
    is_host: bool = False
    is_notice: bool = False


def find(line: str) -> tuple[OomPattern, int] | None:
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
