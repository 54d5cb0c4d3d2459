"""How programs say that they ran out of memory, a line each, with what is to be made of it; and what only sounds so."""

from typing import Any

from gpuyard.model.out_of_memory import Shortage, ShortageKind

DEVICE, HOST = ShortageKind.DEVICE, ShortageKind.HOST
GB = 1024.0


def device(framework: str, **figures: Any) -> Shortage:
    return Shortage(where=DEVICE, says="", framework=framework, **figures)


def host(framework: str, *, asked_mb: float) -> Shortage:
    return Shortage(where=HOST, says="", framework=framework, asked_mb=asked_mb)


PYTORCH = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 1 has a total capacity of 139.75 GiB "
    "of which 12.00 MiB is free. Process 4711 has 100.00 GiB memory in use. Including non-PyTorch memory, this process "
    "has 39.50 GiB memory in use. Of the allocated memory 38.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved "
    "by PyTorch but unallocated. If reserved but unallocated memory is large try setting something."
)
PYTORCH_OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate 2.50 GiB (GPU 0; 23.50 GiB total capacity; 21.00 GiB already "
    "allocated; 10.00 MiB free; 22.00 GiB reserved in total by PyTorch)"
)
PYTORCH_OLDEST = (
    "RuntimeError: CUDA out of memory. Tried to allocate 12.50 MiB (GPU 3; 10.50 GiB total capacity; 8.50 GiB already "
    "allocated; 9.25 MiB free; 4.75 MiB cached)"
)
HIP = (
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 432.00 MiB. GPU 0 has a total capacity of 16.00 GiB "
    "of which 7.00 MiB is free. Of the allocated memory 8.00 GiB is allocated by PyTorch, and 512.00 MiB is reserved "
    "by PyTorch but unallocated."
)
MISSPELT = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 32.00 MiB. GPU 0 has a total capacty of "
    "4.00 GiB of which 0 bytes is free."
)
MPS = (
    "RuntimeError: MPS backend out of memory (MPS allocated: 16.00 GB, other allocations: 1.00 MB, max allowed: "
    "18.00 GB). Tried to allocate 512.00 MB on private pool."
)
XLA = (
    "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3221225472 bytes."
)
BFC = "W tensorflow/tsl/bfc_allocator.cc:485] Allocator (GPU_0_bfc) ran out of memory trying to allocate 3.00GiB"
NOTICE = (
    "E external/xla/xla/stream_executor/cuda/cuda_driver.cc:1039] failed to allocate 3.00G (3221225472 bytes) from "
    "device: CUDA_ERROR_OUT_OF_MEMORY: out of memory"
)
ARENA = (
    "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running Conv node. Name:'c' "
    "Status Message: bfc_arena.cc:376 void* onnxruntime::BFCArena::AllocateRawInternal(size_t, bool) Failed to "
    "allocate memory for requested buffer of size 1073741824"
)
TENSOR = (
    "ResourceExhaustedError: OOM when allocating tensor with shape[1024,1024,256] and type float on "
    "/job:localhost/replica:0/task:0/device:GPU:1 by allocator GPU_1_bfc"
)
CUPY = (
    "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 8,589,934,592 bytes (allocated so far: "
    "1,073,741,824 bytes)."
)
VLLM = (
    "ValueError: Free memory on device cuda:0 (3.25/24.00 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 21.60 GiB). Decrease it."
)
CPU = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
    "to allocate 137438953472 bytes. Error code 12 (Cannot allocate memory)"
)

FIGURES = [
    (
        PYTORCH,
        device("PyTorch", asked_mb=20 * GB, free_mb=12.0, total_mb=139.75 * GB, held_mb=39.5 * GB, device_index=1),
    ),
    (
        PYTORCH_OLD,
        device("PyTorch", asked_mb=2.5 * GB, free_mb=10.0, total_mb=23.5 * GB, held_mb=22 * GB, device_index=0),
    ),
    (
        PYTORCH_OLDEST,
        device("PyTorch", asked_mb=12.5, free_mb=9.25, total_mb=10.5 * GB, held_mb=8.5 * GB, device_index=3),
    ),
    (HIP, device("PyTorch", asked_mb=432.0, free_mb=7.0, total_mb=16 * GB, held_mb=8.5 * GB, device_index=0)),
    (MISSPELT, device("PyTorch", asked_mb=32.0, free_mb=0.0, total_mb=4 * GB, device_index=0)),
    (MPS, device("PyTorch", asked_mb=512.0, total_mb=18 * GB, held_mb=16 * GB)),
    (XLA, device("JAX", asked_mb=3 * GB)),
    ("RuntimeError: Resource exhausted: Out of memory allocating 2147483648 bytes.", device("JAX", asked_mb=2 * GB)),
    (
        "XlaRuntimeError: RESOURCE_EXHAUSTED: Failed to allocate request for 1.50GiB (1610612736B) on device ordinal 2",
        device("JAX", asked_mb=1.5 * GB, device_index=2),
    ),
    (BFC, device("TensorFlow", asked_mb=3 * GB, device_index=0)),
    (TENSOR, device("TensorFlow", asked_mb=1 * GB, device_index=1)),
    (NOTICE, device("XLA", asked_mb=3 * GB)),
    (CUPY, device("CuPy", asked_mb=8 * GB, held_mb=1 * GB)),
    (
        "OutOfMemoryError: out of memory to allocate 1073741824 bytes (total 2147483648 bytes)",
        device("CuPy", asked_mb=1 * GB, held_mb=2 * GB),
    ),
    (VLLM, device("vLLM", asked_mb=21.6 * GB, free_mb=3.25 * GB, total_mb=24 * GB, device_index=0)),
    (
        "ggml_backend_cuda_alloc_buffer: allocating 9866.00 MiB on device 1: cudaMalloc failed: out of memory",
        device("llama.cpp", asked_mb=9866.0, device_index=1),
    ),
    (
        "alloc_tensor_range: failed to allocate CUDA4 buffer of size 150994944",
        device("llama.cpp", asked_mb=144.0, device_index=4),
    ),
    (ARENA, device("ONNX Runtime", asked_mb=1 * GB)),
    (
        "Out of memory error on GPU 2. Cannot allocate 1.500000GB memory on GPU 2, available memory is only 416.5MB.",
        device("PaddlePaddle", asked_mb=1.5 * GB, free_mb=416.5, device_index=2),
    ),
    ("host:17:18 [3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes", device("NCCL", asked_mb=6.0)),
    (
        "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 12.0 GiB for an array with shape (1, 2)",
        host("NumPy", asked_mb=12 * GB),
    ),
    (CPU, host("PyTorch", asked_mb=128 * GB)),
    ("memory allocation of 1073741824 bytes failed", host("Rust", asked_mb=1 * GB)),
]

WORDS = [
    ("torch.OutOfMemoryError: Allocation on device", DEVICE, "PyTorch"),
    ("RuntimeError: No executable batch size found, reached zero.", DEVICE, "PyTorch"),
    ("RuntimeError: XPU out of memory. Tried to allocate 1.71 GiB (GPU 0; 15.56 GiB total)", DEVICE, "PyTorch"),
    ("RuntimeError: CUDA error: out of memory", DEVICE, "CUDA"),
    ("torch.AcceleratorError: CUDA error: out of memory", DEVICE, "CUDA"),
    ("RuntimeError: cuda runtime error (2) : out of memory at THCStorage.cu:58", DEVICE, "CUDA"),
    ("OSError: (External) CUDA error(2), out of memory.", DEVICE, "CUDA"),
    ("CUDA Driver API error out of memory (code: 2, file:render.cpp, line: 12)", DEVICE, "CUDA"),
    ("CUDARuntimeError: cudaErrorMemoryAllocation: out of memory", DEVICE, "CUDA"),
    ("terminate called ... what():  std::bad_alloc: cudaErrorMemoryAllocation: out of memory", DEVICE, "CUDA"),
    ("mxnet.base.MXNetError: pooled_storage_manager.h:157: cudaMalloc failed: out of memory", DEVICE, "CUDA"),
    ("[error] CUDA_ERROR_OUT_OF_MEMORY: out of memory [cuda_buffer.cpp:9]", DEVICE, "CUDA"),
    ("cufft error: CUFFT_ALLOC_FAILED", DEVICE, "CUDA"),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", DEVICE, "cuBLAS"),
    ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", DEVICE, "cuDNN"),
    ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", DEVICE, "cuDNN"),
    ("CudaAPIError: [2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY", DEVICE, "Numba"),
    ("MemoryError: std::bad_alloc: out_of_memory: CUDA error at: resource.hpp:60", DEVICE, "RMM"),
    ("ERROR: HIPError(code hipErrorOutOfMemory, out of memory)", DEVICE, "HIP"),
    ("HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime failed to allocate", DEVICE, "HIP"),
    ("RuntimeError: HIP error: out of memory", DEVICE, "HIP"),
    ("host:1:2 [0] enqueue.cc:1085 NCCL WARN Cuda failure 2 'out of memory'", DEVICE, "NCCL"),
    ("vk::Device::allocateMemory: ErrorOutOfDeviceMemory", DEVICE, "Vulkan"),
    ("vkAllocateMemory: VK_ERROR_OUT_OF_DEVICE_MEMORY", DEVICE, "Vulkan"),
    ("Error: System is out of GPU memory", DEVICE, "Blender"),
    ("System is out of GPU and shared host memory", DEVICE, "Blender"),
    ("Out of memory in cuMemAlloc_v2(&pointer, size) (device.cpp:603)", DEVICE, "Blender"),
    ("OPTIX_ERROR_DEVICE_OUT_OF_MEMORY: Device out of memory [optix.cpp:1]", DEVICE, "OptiX"),
    ("ValueError: No available memory for the cache blocks. Try increasing it.", DEVICE, "vLLM"),
    ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", DEVICE, "SGLang"),
    ("InternalError: Failed copying input tensor to GPU: Dst tensor is not initialized.", DEVICE, "TensorFlow"),
    ("tensorflow.python.framework.errors_impl.ResourceExhaustedError: Graph execution error:", DEVICE, "TensorFlow"),
    ("ERROR: Out of GPU memory trying to allocate 8.000 GiB", DEVICE, "CUDA.jl"),
    ("RuntimeError: the GPU ran out of memory at label 40000", DEVICE, None),
    ("  what():  renderer is out of GPU memory", DEVICE, None),
    ("MemoryError", HOST, "Python"),
    ("MemoryError: cannot build the index", HOST, "Python"),
    ("OSError: [Errno 12] Cannot allocate memory", HOST, "Python"),
    ("-bash: fork: Cannot allocate memory", HOST, "the system"),
    ("  what():  std::bad_alloc", HOST, "C++"),
    ("RuntimeError: DataLoader worker (pid 19597) is killed by signal: Killed.", HOST, "PyTorch"),
    ("ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.", HOST, "Ray"),
    ("slurmstepd: error: Detected 1 oom_kill event in StepId=17.batch.", HOST, "the kernel"),
    ("VK_ERROR_OUT_OF_HOST_MEMORY", HOST, "Vulkan"),
    ("OOM when allocating tensor with shape[9,9] and type float on /job:l/replica:0/task:0/device:CPU:0", HOST,
     "TensorFlow"),
]  # fmt: skip

OTHER = [
    "",
    "Killed",
    "ValueError: not enough values to unpack",
    "If you get CUDA out of memory. Tried to allocate errors, lower --batch",
    "hint: use --lowvram to avoid CUDA error: out of memory",
    "running out of memory is not a problem here",
    "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 106496, Hardware limit: 101376.",
    "java.lang.OutOfMemoryError: Java heap space",
    "FATAL ERROR: Reached heap limit Allocation failed - JavaScript heap out of memory",
    "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "grpc: RESOURCE_EXHAUSTED: Received message larger than max (5 vs. 4)",
    "errors_impl.ResourceExhaustedError: /data/model.ckpt; No space left on device",
    f"{BFC} with freed_by_count=0. The caller indicates that this is not a failure, but may mean less speed.",
    "ImportError: libgomp.so.1: cannot allocate memory in static TLS block",
    "    except MemoryError:",
    "    except torch.cuda.OutOfMemoryError:",
    "RuntimeError: DataLoader worker (pid 1) is killed by signal: Bus error.",
]
