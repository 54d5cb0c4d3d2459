"""Choose the line of a failed program's output that says why it failed, and decide whether its GPU was to blame.

- Of the last 400 lines the last *cause* is the answer: the error of a Python traceback, of another language's runtime,
  of a driver or a full disk, a death such as "Killed". Without one, the last *message* of a shell or another program.
  Without that, the last *consequence*: what launchers and ranks write after another program has failed.
- A traceback that was ignored, or only logged by `logging` itself, did not end the program. An error whose line ends in
  a colon continues on the next line. Standard error counts before standard output.
- The GPU is to blame where the driver or the hardware says that it is gone, broken or cannot be used. An illegal memory
  access or a failed launch is mostly a mistake of the program, and does not count.
"""

import re
from collections.abc import Iterator, Sequence
from enum import IntEnum
from operator import itemgetter

from msgspec.structs import replace

from gpuyard.model.job import Outcome, OutcomeKind
from gpuyard.model.lazy_pattern import LazyPattern
from gpuyard.model.printable_text import printable
from gpuyard.model.terminal_line import last_lines

LONGEST = 240

_TRACEBACK = "Traceback (most recent call last)"
_NOT_FATAL = ("Exception ignored in", "Exception ignored while", "--- Logging error ---")
_IN_THREAD = "Exception in thread"
# What the lines of an exception group begin with.
_GROUP = LazyPattern(r"^ {2,40}[|+][ -]?")
_RAISED = LazyPattern(r"(?:[A-Za-z_]\w{0,99}\.){0,20}[A-Za-z_]\w{0,99}(?:\([\w.]{1,99}\))?(?:: .*|:?\s*)")

# Errors by which launchers, worker pools and sibling ranks report that another process has failed.
_CONSEQUENCES = LazyPattern(
    r"^(?:[\w.]{0,120}\.)?(?:ChildFailedError|CalledProcessError|BrokenProcessPool|ProcessExitedException|"
    r"ProcessRaisedException|DistBackendError|DistNetworkError|DistStoreError|RayTaskError|RayActorError|ActorDiedError|"
    r"BrokenPipeError|ConnectionResetError|KeyboardInterrupt|SystemExit|WorkerCrashedError|JobFailedError)\b"
    r"|\bDataLoader worker \(pid|\bConnection closed by peer\b|^SignalException\b"
    r"|^(?:srun|slurmstepd|prun|prterun|mpirun|mpiexec|orterun): |^make(?:\[\d{1,4}\])?: \*\*\* |^ninja: build stopped"
    r"|\bfailed \(exitcode: -?\d|\bSending process \d{1,9} closing|\bSignal \d{1,3} \(SIG\w{1,9}\) received by PID"
    r"|\bexits with return code = |^Aborted\b|\bAborted +\(core dumped\)"
)
_CAUSES = LazyPattern(
    # An error without a traceback of its own, as for a SyntaxError or after a traceback in a frame
    r"^(?:[A-Za-z_]\w{0,99}\.){0,20}[A-Z]\w{0,99}(?:Error|Exception|Interrupt)(?:: \S.*|:?\s*$)"
    r"|^Fatal Python error: "
    r"|^gpuyard: error: "
    # C, C++, Rust, Go, Java, JavaScript, Julia, R
    r"|\bAssertion [`'].{1,300} failed\b|\bassertion failed\b"
    r"|\*\*\* stack smashing detected|^(?:double free or corruption|free\(\): |malloc\(\): |corrupted )"
    r"|^(?:libc\+\+abi: )?terminat(?:e called|ing)\b"
    r"|^thread '.{0,99}' (?:\(\d{1,20}\) )?panicked at |^panic: |^fatal error: "
    r'|^Exception in thread "'
    r"|^ERROR: |^Error(?: in .{0,300}?)? ?: ?"
    r"|^forrtl: (?:severe|error)"
    # Deaths that a shell reports: `train.sh: line 3:  4242 Killed    python train.py`
    r"|^(?:.{1,300}: line \d{1,9}: +\d{1,9} )?(?:Killed|Segmentation fault|Bus error|Illegal instruction)\b"
    r"|^(?:.{1,300}: line \d{1,9}: +\d{1,9} )?(?:Floating point exception|Terminated|Trace/breakpoint trap)\b"
    # A full disk
    r"|\bNo space left on device\b|\bDisk quota exceeded\b|\bRead-only file system\b|\bStale file handle\b"
    # GPUs
    r"|\b(?:CUDA|HIP|NCCL|RCCL|cuDNN|cuBLAS|OptiX|Vulkan)(?: \w{1,20}){0,2} (?:error|failure)\b(?!s)"
    r"|\bcudaError[A-Z]\w{1,60}|\bCUDA_ERROR_[A-Z]\w{1,60}|\bhipError[A-Z]\w{1,60}"
    r"|\bNCCL WARN\b|\bnccl\w{1,30}Error\b"
    r"|\bCU(?:BLAS|DNN|SOLVER|FFT|SPARSE|RAND)_STATUS_(?!SUCCESS)[A-Z_]{3,60}"
)
_MESSAGES = LazyPattern(
    # A shell
    r"(?:^|: )(?:command )?not found(?:: .{1,200})?$|: unbound variable$|: syntax error\b"
    r"|^[^:]{1,300}: .{0,300}\b(?:No such file or directory|Permission denied|Is a directory|cannot execute)\b"
    # Any other program: `train.py: error: …`, `2026-11-18 03:00:00 ERROR …`, `[error] …`
    r"|(?:^|: )(?:[Ff]atal )?[Ee]rror(?:\[\w{1,20}\])?: (?![-+\d.e%]{1,40}\s*$)"
    r"|(?:^|[\s\[\]|:(-])(?:ERROR|FATAL|CRITICAL|SEVERE)(?=[\s\]|:)-])(?!: ?[-+\d.e%]{1,40}\s*$)"
    r"|^\[(?:error|fatal|critical)\]|^(?:fatal|FATAL): "
)
# Lines that match and are no error: advice, warnings, the frames of stacks, and what gpuyard itself notes in a log.
_ADVICE = LazyPattern(
    r"^--- gpuyard: "
    r"|^\s{1,20}(?:at |File |\^|from |frame #|\[\d)|^(?:frame #|CUDA kernel errors might|For debugging consider|"
    r"Compile with|Set the environment variable|Device-side assertion|Search for [`'])|\b0 errors?\b"
    r"|^Error executing job with overrides|\b(?i:warning)\b|\b(?:INFO|DEBUG)\b|\b[WI] (?:tensorflow|external)/"
)
_WHAT = LazyPattern(r"^\s{0,8}what\(\): {1,4}(.*)")
_THROWN = LazyPattern(r"\b(?:instance of|uncaught exception of type) '?([\w:<>, ]{1,120})'?")
_SIGNAL = LazyPattern(r"signal \d{1,3} \((SIG\w{1,12})\)")
# A progress bar, also one of gpuyard, and what gpuyard itself notes in a log
_NO_MESSAGE = LazyPattern(
    r"\d{1,3}%\s{0,4}[|\[]|[█━▏▎▍▌▋▊▉]{3}|^gpuyard: [\d,]{1,20} of [\d,]{1,20} (?:labels|done), |^--- gpuyard: "
)
_OWN = "gpuyard: "
_FRAME = " \t=-_*#~+|│┃╭╮╰╯─━"
_DEVICE_FAULTS = LazyPattern(
    r"uncorrectable (?:ECC|NVLink) error|CUDA_ERROR_(?:ECC|NVLINK)_UNCORRECTABLE"
    r"|(?:CUDA|ROCm)-capable devices? (?:is|are) (?:detected|busy or unavailable)"
    r"|CUDA_ERROR_(?:NO_DEVICE|DEVICE_UNAVAILABLE|SYSTEM_NOT_READY)|hipError(?:NoDevice|ECCNotCorrectable)"
    r"|cudaError(?:NoDevice|DevicesUnavailable|ECCUncorrectable|NvlinkUncorrectable|SystemNotReady)"
    r"|\bGPU (?:is lost|has fallen off the bus)|HW Exception by GPU node",
    re.IGNORECASE,
)


class _Weight(IntEnum):
    CONSEQUENCE = 0
    MESSAGE = 1
    CAUSE = 2


def explain_failure(outcome: Outcome, texts: Sequence[str]) -> Outcome:
    """Return the outcome of a failed attempt with the line that says why. `texts` are the ends of its outputs."""
    if outcome.kind is not OutcomeKind.FAILED:
        return outcome
    error = find_error_line(texts)
    if error is not None:
        return replace(outcome, error_line=error, reason=_with_reason(error, outcome.reason))
    last = find_last_line(texts)
    if last is None or not (outcome.reason or "").startswith("exit status"):
        return outcome
    how = f": {last.removeprefix(_OWN)}" if last.startswith(_OWN) else f" after “{last}”"
    return replace(outcome, reason=f"{outcome.reason}{how}")


def find_error_line(texts: Sequence[str]) -> str | None:
    """Return the printable line that says why a program failed, of at most 240 characters, or None."""
    found = [each for text in texts if (each := _last_error(_read(text))) is not None]
    return max(found, key=itemgetter(0))[1] if found else None


def find_last_line(texts: Sequence[str]) -> str | None:
    """Return the last line with a word in it, shortened. Neither progress bars nor gpuyard's hints count."""
    for text in texts:
        lines = _read(text)
        for at in range(len(lines) - 1, -1, -1):
            line = lines[at]
            if line.startswith("  "):
                message = next((each for each in reversed(lines[:at]) if not each.startswith("  ")), "")
                line = message if message.startswith(_OWN) else line
            stripped = line.strip(_FRAME)
            if any(map(str.isalnum, stripped)) and not _NO_MESSAGE.search(line):
                return printable(stripped, longest=120)
    return None


def find_device_fault(text: str) -> str | None:
    """Return the last line of an output that reports a fault of a GPU, or None."""
    found = next((line for line in reversed(_read(text)) if _DEVICE_FAULTS.search(line)), None)
    return None if found is None else printable(found.strip(), LONGEST)


def _with_reason(error: str, reason: str | None) -> str:
    """Return the error with how the program ended, such as `ValueError: loss is NaN (exit status 1)`."""
    if reason is None:
        return error
    signal = _SIGNAL.fullmatch(reason)
    if signal is None and "(" in reason:  # a sentence of its own
        return f"{reason}: {error}"
    return f"{error} ({reason if signal is None else signal[1]})"


def _read(text: str) -> list[str]:
    return last_lines(text, 400, 1 << 16, 600)


def _last_error(lines: Sequence[str]) -> tuple[_Weight, str] | None:
    """Return the last line of the greatest weight, with that, or None."""
    raised = dict(_raised_errors(lines))
    best: tuple[_Weight, int] | None = None
    for at in range(len(lines) - 1, -1, -1):
        weight = raised[at] if at in raised else _weigh(lines[at])
        if weight is not None and (best is None or weight > best[0]):
            best = weight, at
        if weight is _Weight.CAUSE:
            break
    return None if best is None else (best[0], _complete(lines, best[1]))


def _raised_errors(lines: Sequence[str]) -> Iterator[tuple[int, _Weight | None]]:
    """Yield where the tracebacks end, and what their errors count for: None if they did not end the program."""
    before = ""
    for header, line in enumerate(lines):
        if _TRACEBACK in line:
            # The error of a traceback is the first line that is not indented.
            rest = ((at, _GROUP.sub("", lines[at])) for at in range(header + 1, len(lines)))
            ends = (at for at, text in rest if text and not text[0].isspace() and _RAISED.fullmatch(text))
            if (at := next(ends, None)) is not None:
                error = _GROUP.sub("", lines[at])
                is_other = before.startswith(_IN_THREAD) or _CONSEQUENCES.search(error) is not None
                weight = _Weight.CONSEQUENCE if is_other else _Weight.CAUSE
                yield at, None if any(text in before for text in _NOT_FATAL) else weight
        if line.strip():
            before = line


def _weigh(line: str) -> _Weight | None:
    if not line or line.isspace() or _ADVICE.search(line):
        return None
    if _CONSEQUENCES.search(line):
        return _Weight.CONSEQUENCE
    if _CAUSES.search(line):
        return _Weight.CAUSE
    return _Weight.MESSAGE if _MESSAGES.search(line) else None


def _complete(lines: Sequence[str], at: int) -> str:
    """Return the error on one line, with the line that follows where that one has the message."""
    line = _GROUP.sub("", lines[at]).strip()
    following = next((text.strip() for text in lines[at + 1 :] if text.strip()), "")
    thrown, what = _THROWN.search(line), _WHAT.match(following)
    if what is not None:
        line = f"{thrown[1].strip() if thrown is not None else 'terminated'}: {what[1]}"
    elif line.endswith(":") and following and _TRACEBACK not in following:
        line = f"{line} {following}"
    return printable(" ".join(line.split()), LONGEST)
