"""The program of the torture run's jobs, with the standard library alone. It writes down what happens to it.

    job.py EVIDENCE NAME MB SECONDS LINES PLAN

It prints LINES numbered lines over SECONDS, and appends its start, its progress and its end to EVIDENCE, outside of the
tortured file systems (evidence.py reads them). A line that could not be printed is written down there, too. MB is the
memory that it was promised on each device, `-` for whole devices. PLAN is how it ends:

    ok            exit 0
    fail:3        exit 3
    flaky:2       exit 1 in attempts before the second
    oom           the first attempt prints an out-of-memory error of CUDA and exits 1
    stubborn      ignore SIGTERM, exit 0
"""

import os
import resource
import signal
import sys
import time

_LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)


def main() -> int:
    path, name, mb, seconds, lines, plan = sys.argv[1:]
    for limit in _LIMITS:  # the keeper may have been limited when it started us: that is its trouble
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (hard, hard))
    evidence = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    job = os.environ.get("GPUYARD_JOB_ID")
    number = int(os.environ.get("GPUYARD_ATTEMPT", "1"))
    run = f"{job}.{number}" if job is not None else name

    def note(what: str, *more: object) -> None:
        fields = " ".join(str(each) for each in (what, run, os.getpid(), f"{time.monotonic():.6f}", *more))
        os.write(evidence, f"{fields}\n".encode())

    def end(status: int) -> int:
        note("end", status)
        return status

    def stop(*_: object) -> None:
        os._exit(end(143))

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if plan == "stubborn" else stop)
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "-1")
    note("start", devices, mb, name)
    printed = _print_lines(note, run, int(lines), float(seconds))
    if plan == "oom" and number == 1:
        text = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 0 bytes free.\n"
        try:
            os.write(2, text)
        except OSError:  # without the message it is a failure like any other
            return end(4)
        return end(1)
    note("printed", printed)
    kind, _, value = plan.partition(":")
    if kind == "fail":
        return end(int(value))
    return end(1 if kind == "flaky" and number < int(value) else 0)


def _print_lines(note, run: str, lines: int, seconds: float) -> int:  # type: ignore[no-untyped-def]  # no typing here
    pause = seconds / max(1, lines)
    noted = time.monotonic()
    for line in range(1, lines + 1):
        text = f"line {run} {line} .\n".encode()
        try:
            written = os.write(1, text)
        except OSError as error:
            note("miss", line, error.errno)
        else:
            if written != len(text):
                note("miss", line, 0)
        now = time.monotonic()
        if now > noted + 0.4:
            note("tick", line)
            noted = now
        time.sleep(pause)
    return lines


if __name__ == "__main__":
    sys.exit(main())
