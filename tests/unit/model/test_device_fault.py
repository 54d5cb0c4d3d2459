import pytest

from gpuyard.model.error_line import find_device_fault


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "torch.AcceleratorError: CUDA error: no CUDA-capable device is detected",
        "CUDA error 46: all CUDA-capable devices are busy or unavailable",
        "jaxlib.xla_extension.XlaRuntimeError: INTERNAL: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error",
        "Unable to determine the device handle for GPU 0000:01:00.0: GPU is lost.  Reboot the system to recover",
        "RuntimeError: No HIP GPUs: no ROCm-capable device is detected",
        "HW Exception by GPU node-1 (Agent handle: 0x5578) reason :GPU Hang",
    ],
)
def test_errors_of_the_driver_and_the_hardware_are_recognised(line: str) -> None:
    assert find_device_fault(f"epoch 3\n{line}\ntearing down\n") == line


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "RuntimeError: CUDA error: device-side assert triggered",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "using GPU 0: NVIDIA H200",
        "ValueError: the device is lost in thought",
    ],
)
def test_mistakes_of_the_program_are_not(line: str) -> None:
    assert find_device_fault(line) is None


def test_only_the_end_of_the_output_counts_and_it_is_made_printable() -> None:
    fault = "CUDA error: uncorrectable ECC error encountered"
    assert find_device_fault(fault + "\nfine" * 500) is None
    assert find_device_fault(f"\x1b[31m{fault}\x01.") == f"{fault}\\x01."
