"""The line that says why a program failed: outputs of programs that are run here, samples of others, and any text."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.model.error_line import LONGEST, explain_failure, find_device_fault, find_error_line, find_last_line
from gpuyard.model.job import Outcome, OutcomeKind
from tests.known import known

CHAINED = "try:\n 1/0\nexcept Exception as error:\n raise RuntimeError('training failed') from error"
TASK_GROUP = """
import asyncio
async def fail(): raise ValueError('inner')
async def main():
    async with asyncio.TaskGroup() as group: group.create_task(fail())
asyncio.run(main())
"""
LATE = "class A:\n def __del__(self): raise OSError('late')\na = A()\nraise ValueError('first')"
POOL = """
from concurrent.futures import ProcessPoolExecutor
with ProcessPoolExecutor(1) as pool: pool.submit(int, 'x').result()
"""
CHILD = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import nope'], check=True)"
BAR = (
    "import sys\nfor i in range(9): sys.stderr.write(f'\\r {i*9}%|{chr(9608)*i}| {i}/9')\nraise ValueError('in a bar')"
)
LOGGED = (
    "import logging\ntry: 1/0\nexcept Exception: logging.exception('step failed')\nlogging.error('giving up')\nexit(1)"
)
RICH = "import rich.traceback\nrich.traceback.install()\nraise ValueError('in colours')"
CPP = """#include <cassert>
#include <cstdlib>
#include <stdexcept>
int main(int count, char**) {
    if (count > 2) { void* p = malloc(3); free(p); free(p); }
    assert(count < 2);
    throw std::runtime_error("no GPU");
}"""


def output_of(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    assert done.returncode
    return done.stdout.decode(errors="replace")


@pytest.mark.parametrize(
    ("program", "line"),
    [
        ("raise ValueError('loss is NaN')", "ValueError: loss is NaN"),
        (CHAINED, "RuntimeError: training failed"),
        ("import nope", "ModuleNotFoundError: No module named 'nope'"),
        ("assert False", "AssertionError"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("class Diverged(Exception): pass\nraise Diverged('at step 3')", "Diverged: at step 3"),
        ("raise ValueError('cannot load:\\n  size mismatch')", "ValueError: cannot load: size mismatch"),
        (TASK_GROUP, "ValueError: inner"),
        (LATE, "ValueError: first"),
        (POOL, "ValueError: invalid literal for int() with base 10: 'x'"),
        (CHILD, "ModuleNotFoundError: No module named 'nope'"),
        (BAR, "ValueError: in a bar"),
        (LOGGED, "ZeroDivisionError: division by zero"),
        (RICH, "ValueError: in colours"),
        (
            "import threading\nthreading.Thread(target=lambda: 1/0).start()\nexit(3)",
            "ZeroDivisionError: division by zero",
        ),
        ("open('/dev/full', 'w').write('x' * 99999)", "OSError: [Errno 28] No space left on device"),
        (
            "import faulthandler, ctypes\nfaulthandler.enable()\nctypes.string_at(0)",
            "Fatal Python error: Segmentation fault",
        ),
    ],
)
def test_the_error_of_a_python_program_is_found(program: str, line: str) -> None:
    found = find_error_line([output_of(sys.executable, "-c", program)])
    assert found == line


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("frobnicate", "bash: line 1: frobnicate: command not found"),
        ("echo start; cat /nope", "cat: /nope: No such file or directory"),
        ("set -u; echo $NOPE", "bash: line 1: NOPE: unbound variable"),
        ("/etc/passwd", "bash: line 1: /etc/passwd: Permission denied"),
        ("cp /nope /tmp; echo 'epoch 1 error: 0.35'; exit 1", "cp: cannot stat '/nope': No such file or directory"),
    ],
)
def test_the_error_of_a_shell_is_found(script: str, line: str) -> None:
    assert find_error_line([output_of("bash", "-c", script)]) == line


@pytest.mark.parametrize("signal", ["KILL", "SEGV"])
def test_a_death_that_a_shell_reports_is_found(signal: str) -> None:
    found = known(find_error_line([output_of("bash", "-c", f"bash -c 'kill -{signal} $$'; exit 1")]))
    assert {"KILL": " Killed ", "SEGV": " Segmentation fault "}[signal] in found


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_the_errors_of_a_compiler_and_of_its_program_are_found(tmp_path: Path) -> None:
    source, program = tmp_path / "a.cpp", str(tmp_path / "a.out")
    source.write_text("int main() { return nope; }")
    assert "was not declared in this scope" in (find_error_line([output_of("g++", str(source))]) or "")
    source.write_text(CPP)
    subprocess.run(["g++", str(source), "-o", program], check=True)
    assert find_error_line([output_of(program)]) == "std::runtime_error: no GPU"
    assert find_error_line([output_of("bash", "-c", f"{program}; exit $?")]) == "std::runtime_error: no GPU"
    assert "Assertion `count < 2' failed" in (find_error_line([output_of(program, "1")]) or "")
    assert (find_error_line([output_of(program, "1", "2")]) or "").startswith("free(): double free")


TORCHRUN = """\
W1118 03:10:11.402000 4711 torch/distributed/run.py:774] *****************************************
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/ada/train.py", line 31, in <module>
[rank1]:     main()
[rank1]:   File "/home/ada/train.py", line 27, in main
[rank1]:     raise ValueError("loss is NaN")
[rank1]: ValueError: loss is NaN
[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/ada/train.py", line 22, in main
[rank0]:     dist.all_reduce(loss)
[rank0]: torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/ProcessGroupNCCL.cpp:3690, remote process \
exited or there was a network error, NCCL version 2.27.3
W1118 03:10:13.100000 4711 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 4720 \
closing signal SIGTERM
E1118 03:10:13.215000 4711 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1) local_rank: 1 \
(pid: 4721) of binary: /home/ada/env/bin/python
Traceback (most recent call last):
  File "/home/ada/env/bin/torchrun", line 8, in <module>
    sys.exit(main())
  File "/home/ada/env/lib/python3.12/site-packages/torch/distributed/launcher/api.py", line 277, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\x20
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-18_03:10:13
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 4721)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""
DEVICE_ASSERT = """\
/pytorch/aten/src/ATen/native/cuda/Loss.cu:245: nll_loss_forward: block: [0,0,0] Assertion `t >= 0` failed.
Traceback (most recent call last):
  File "train.py", line 9, in <module>
    loss.backward()
RuntimeError: CUDA error: device-side assert triggered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.

Exception raised from c10_cuda_check_implementation at /pytorch/c10/cuda/CUDAException.cpp:43 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80 (0x7f2a1b7785e8 in libc10.so)
frame #1: <unknown function> + 0xe0d4 (0x7f2a1b2c80d4 in libc10_cuda.so)
"""
HYDRA = """\
Error executing job with overrides: ['lr=0.1']
Traceback (most recent call last):
  File "/home/ada/train.py", line 12, in main
    train(config)
KeyError: 'optimizer'

Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.
"""
ACCELERATE = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    import flash_attn
ModuleNotFoundError: No module named 'flash_attn'
Traceback (most recent call last):
  File "/env/bin/accelerate", line 8, in <module>
    sys.exit(main())
subprocess.CalledProcessError: Command '['/env/bin/python', 'train.py']' returned non-zero exit status 1.
"""
RAY = """\
2026-11-18 03:00:00,000\tINFO worker.py:1852 -- Started a local Ray instance.
Traceback (most recent call last):
  File "tune.py", line 8, in <module>
    ray.get(train.remote())
ray.exceptions.RayTaskError(ValueError): \x1b[36mray::train()\x1b[39m (pid=4711, ip=10.0.0.4)
  File "tune.py", line 5, in train
    raise ValueError("bad batch")
ValueError: bad batch
\x1b[36m(train pid=4712)\x1b[0m epoch 3
"""


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (TORCHRUN, "ValueError: loss is NaN"),
        (DEVICE_ASSERT, "RuntimeError: CUDA error: device-side assert triggered"),
        (HYDRA, "KeyError: 'optimizer'"),
        (ACCELERATE, "ModuleNotFoundError: No module named 'flash_attn'"),
        (RAY, "ValueError: bad batch"),
        ("srun: error: node7: task 3: Exited with code 1\n", "srun: error: node7: task 3: Exited with code 1"),
        (
            "ValueError: bad\nsrun: error: node7: task 3: Exited with code 1\nslurmstepd: error: *** STEP ENDED ***\n",
            "ValueError: bad",
        ),
        (
            "node7:4711:4790 [0] transport/net_socket.cc:201 NCCL WARN NET/Socket : peer closed\nepoch 4\n",
            "node7:4711:4790 [0] transport/net_socket.cc:201 NCCL WARN NET/Socket : peer closed",
        ),
        (
            'CUDA error at a.cu:12 code=700(cudaErrorIllegalAddress) "cudaMemcpy"\n',
            'CUDA error at a.cu:12 code=700(cudaErrorIllegalAddress) "cudaMemcpy"',
        ),
        (
            "ERROR: LoadError: UndefVarError: `x` not defined\nStacktrace:\n [1] top-level scope\n   @ ~/a.jl:1\n",
            "ERROR: LoadError: UndefVarError: `x` not defined",
        ),
        (
            "Error in library(torch) : there is no package called 'torch'\nExecution halted\n",
            "Error in library(torch) : there is no package called 'torch'",
        ),
        ("Error in fit(x) : \n  subscript out of bounds\nCalls: fit\nExecution halted\n",
         "Error in fit(x) : subscript out of bounds"),
        ("thread 'main' panicked at src/main.rs:2:5:\nindex out of bounds\nnote: run with `RUST_BACKTRACE=1`\n",
         "thread 'main' panicked at src/main.rs:2:5: index out of bounds"),
        ("panic: runtime error: index out of range [5]\n\ngoroutine 1 [running]:\n",
         "panic: runtime error: index out of range [5]"),
        ('Exception in thread "main" java.lang.RuntimeException: boom\n\tat A.main(A.java:3)\n',
         'Exception in thread "main" java.lang.RuntimeException: boom'),
        ("usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --lrr 1\n",
         "train.py: error: unrecognized arguments: --lrr 1"),
        ("2026-11-18 03:00:00 INFO epoch 3\n2026-11-18 03:00:01 ERROR trainer: loss diverged\n",
         "2026-11-18 03:00:01 ERROR trainer: loss diverged"),
        ("2026-11-18T03:00:00.123+00:00 ValueError: with our times\n", "ValueError: with our times"),
        ("wget: cannot write to 'x': No space left on device\n", "wget: cannot write to 'x': No space left on device"),
        ("\x1b[1;31mValueError\x1b[0m: \x1b[1mred\x1b[0m\r\n", "ValueError: red"),
        ("\r  0%|  | 0/10 [00:00<?, ?it/s]\r 40%|##  | 4/10 [00:01<00:02,  2.00it/s, loss=0.3]RuntimeError: behind\n",
         "RuntimeError: behind"),
        ("12it [1:00:01, 9.87it/s] ERROR: no bar, as the total is unknown\n", "ERROR: no bar, as the total is unknown"),
    ],
)  # fmt: skip
def test_the_errors_of_other_programs_are_found(output: str, line: str) -> None:
    assert find_error_line([f"starting\n{output}"]) == line


@pytest.mark.parametrize(
    "output",
    [
        "",
        "epoch 3 error: 0.35\nval error: 1e-3\nMAE error = 3\n",
        "0 errors, 2 warnings\ntest_error=0.2\n",
        "UserWarning: lr_scheduler was called before optimizer.step()\n  warnings.warn(SCHEDULER_ERROR)\n",
        "2026-11-18 W tensorflow/stream_executor: libcudart.so: cannot open shared object: No such file or directory\n",
    ],
)
def test_figures_and_warnings_are_no_errors(output: str) -> None:
    assert find_error_line([output]) is None


def test_standard_error_and_late_causes_count_first() -> None:
    assert find_error_line(["ValueError: a\n", "KeyError: b\n"]) == "ValueError: a"
    assert find_error_line(["train.py: error: see the log\n", "KeyError: b\n"]) == "KeyError: b"
    # An error that scrolled far away does not count.
    assert find_error_line(["ValueError: early\n" + "step\n" * 500]) is None
    cancelled = Outcome(kind=OutcomeKind.CANCELLED, reason="cancelled")
    assert explain_failure(cancelled, ["ValueError: x"]) == cancelled, "only a failed program is explained"


def failed(status: int = 1, reason: str = "exit status 1") -> Outcome:
    return Outcome(kind=OutcomeKind.FAILED, status=status, reason=reason)


@pytest.mark.parametrize(
    ("outcome", "output", "reason"),
    [
        (failed(), "ValueError: loss is NaN\n", "ValueError: loss is NaN (exit status 1)"),
        (failed(139, "signal 11 (SIGSEGV)"), "Fatal Python error: Segmentation fault\n",
         "Fatal Python error: Segmentation fault (SIGSEGV)"),
        (failed(125, "podman could not run the container (exit status 125); see the job's log"), "Error: no image\n",
         "podman could not run the container (exit status 125); see the job's log: Error: no image"),
        (failed(), "epoch 3\ndataset not found\n 45%|####      | 45/100\n", "exit status 1 after “dataset not found”"),
        (failed(), "epoch 3\n 45%|####      | 45/100 [00:01<00:02, 2.00it/s]no more data\n",
         "exit status 1 after “no more data”"),
        (failed(137, "signal 9 (SIGKILL)"), "epoch 3\n", "signal 9 (SIGKILL)"),
        (failed(129, "exit status 129"), "gpuyard: its session was closed, and it is ended\r\n",
         "exit status 129: its session was closed, and it is ended"),
        (failed(2, "exit status 2"), "loading\ngpuyard: there is no manifest a.json\n  name a file of JSON\n",
         "exit status 2: there is no manifest a.json"),
        (failed(), "results\n    0.93 of 1\n", "exit status 1 after “0.93 of 1”"),
        (failed(3, "exit status 3"), "importing\ngpuyard: 1,303 of 2,000 labels, 12m 5s; VRAM 31.2 GB of 44 GB\n",
         "exit status 3 after “importing”"),
        (failed(), "--- gpuyard: job 1, attempt 1, GPU 0 ---\n", "exit status 1"),
        (failed(), "--- gpuyard: its marker m cannot be written: Permission denied ---\n", "exit status 1"),
        (failed(), "KeyError: 'caught'\n  files  out\ngpuyard: error: 1 of 2 labels skipped: ValueError: no camera\n",
         "gpuyard: error: 1 of 2 labels skipped: ValueError: no camera (exit status 1)"),
        (failed(), "", "exit status 1"),
    ],
)  # fmt: skip
def test_the_reason_says_what_and_how(outcome: Outcome, output: str, reason: str) -> None:
    assert explain_failure(outcome, [output]).reason == reason


PIECES = st.lists(
    st.sampled_from([
        "Traceback (most recent call last):\n", "ValueError: ", "ValueError", "\r", "\n", "\x1b[31m", "\x1b]0;t\x07",
        "\b",
        "  | ", "Error in ", " : ", "terminate called after throwing an instance of '", "  what():  ", "Killed\n", "%|",
        "thread '' panicked at ", "[rank0]: ", "\x00", "\u202e", "\ud800", "x" * 3000, ": No such file or directory",
        "Exception ignored in: ", "#" * 300, "é", "ERROR ",
    ])
    | st.text(max_size=20),
    max_size=40,
)  # fmt: skip


@given(st.lists(PIECES.map("".join), max_size=2), st.sampled_from(["exit status 1", "signal 9 (SIGKILL)", None]))
def test_any_output_gives_a_printable_line_of_bounded_length(texts: list[str], reason: str | None) -> None:
    explained = explain_failure(Outcome(kind=OutcomeKind.FAILED, status=1, reason=reason), texts)
    for text in (explained.reason or "", explained.error_line or "", find_last_line(texts) or ""):
        assert text.isprintable()
        assert len(text) <= LONGEST + 100


@pytest.mark.parametrize(
    "output",
    ["a" * 65_000, ": " * 32_000, "Error in " * 7_000, "\x1b[" * 30_000, "CUDA a " * 9_000, "x\r" * 30_000,
     "a." * 30_000, ("a: " * 53 + "\n") * 400, ("a: " * 600 + "\n") * 35, ("- " * 900 + "\n") * 36],
)  # fmt: skip
def test_a_hostile_output_is_read_in_linear_time(output: str) -> None:
    """A pattern of quadratic time would run into the time limit of the tests: 65 kB are read."""
    assert find_error_line([output]) is None or len(find_error_line([output]) or "") <= LONGEST


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
