"""The options of a submission, in one table of plain data.

`gpuyard submit`, the HTTP body, `Client.submit`, `resubmit` and the form of the web page are made from it. It imports
nothing, because the command line reads it in about a millisecond.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    Kind = Literal["flag", "whole", "number", "size", "time", "choice", "text", "word", "texts", "ids"]

# Priorities are from -MAX_PRIORITY to MAX_PRIORITY.
MAX_PRIORITY = 1_000_000


class SubmitOption:
    """One option: `--name METAVAR`, or a flag where the kind is "flag".

    `kind` says how the value is parsed; `least` and `most` bound whole numbers and times; a
    size may be 0 if `least` is. `default` is the value as a
    user would type it, and `note` describes the default where it is not a single value. "texts" and "ids" may be given
    several times. `label` is what the form of the web page calls it.

    `is_local`: only this machine can fulfil it, and not another engine. `is_for_gpu`: meaningless without a GPU.
    `makes_many`: one submission becomes many jobs. `is_for_batch`: only a batch takes it, and `gpuyard submit` does
    not."""

    def __init__(  # noqa: PLR0913 - the columns of the table
        self,
        name: str,
        kind: "Kind",
        metavar: str | None,
        help: str,  # noqa: A002 - as click and argparse call it
        *,
        default: str | None = None,
        note: str | None = None,
        least: int | None = None,
        most: int | None = None,
        choices: tuple[str, ...] = (),
        label: str | None = None,
        is_local: bool = False,
        is_for_gpu: bool = False,
        makes_many: bool = False,
        is_for_batch: bool = False,
    ) -> None:
        self.name, self.kind, self.metavar, self.help = name, kind, metavar, help
        self.default, self.note = default, note
        self.least, self.most, self.choices, self.label = least, most, choices, label
        self.is_local, self.is_for_gpu = is_local, is_for_gpu
        self.makes_many, self.is_for_batch = makes_many, is_for_batch

    @property
    def is_repeatable(self) -> bool:
        return self.kind in ("texts", "ids")

    @property
    def help_with_default(self) -> str:
        default = self.note or self.default
        return f"{self.help} [{default}]" if default else self.help


_TABLE = (
    SubmitOption("gpus", "whole", "N", "Number of GPUs; 0 for none.", default="1", least=0, most=1024, label="GPUs"),
    SubmitOption("vram", "size", "SIZE", "Reserve this much memory on each GPU, such as 8G.",
                 note="learned from past runs", label="Memory on each GPU", is_for_gpu=True),
    SubmitOption("exclusive", "flag", None, "Use the GPU alone.", label="Use the GPU alone", is_for_gpu=True),
    SubmitOption("ram", "size", "SIZE", "Reserve this much RAM, such as 8G.",
                 note="learned from past runs", label="RAM"),
    SubmitOption("cpus", "whole", "N", "Reserve this many CPUs, and set OMP_NUM_THREADS to it.", least=1, most=100_000),
    SubmitOption("engine", "word", "NAME", "Where it runs: local, slurm or ray.", note="local, or the configuration's"),
    SubmitOption("engine-option", "texts", "TEXT", "Passed to the engine, such as --engine-option=--partition=big."),
    SubmitOption("device", "text", "LIST", "Only these GPUs, such as 0,2, amd:0 or a GPU's id.", is_local=True,
                 is_for_gpu=True),
    SubmitOption("vendor", "choice", "NAME", "Only GPUs of this vendor: nvidia, amd, intel or apple.",
                 note="that of the largest GPU", choices=("nvidia", "amd", "intel", "apple", "simulated"),
                 is_for_gpu=True),
    SubmitOption("gpu-name", "text", "TEXT", "Only GPUs whose name contains this, such as H100.", is_for_gpu=True),
    SubmitOption("linked", "flag", None, "Only GPUs that NVLink or XGMI joins; waits for such a set.",
                 label="Only GPUs joined by NVLink", is_local=True, is_for_gpu=True),
    SubmitOption("same-node", "flag", None, "Only GPUs of one NUMA node; waits for such a set.",
                 label="Only GPUs of one NUMA node", is_local=True, is_for_gpu=True),
    SubmitOption("max-cpu", "number", "P", "Start at no more than P percent CPU use.", is_local=True),
    SubmitOption("min-free-mem-mb", "number", "M", "Start with at least M MB of RAM available."),
    SubmitOption("min-free-disk", "size", "SIZE",
                 "Start with at least this much free on the disks that it writes to; 0: no limit.",
                 note="1G, or the configuration's", least=0, is_local=True),
    SubmitOption("max-gpu", "number", "P", "Only GPUs at no more than P percent use.", is_local=True, is_for_gpu=True),
    SubmitOption("max-gpu-mem-mb", "number", "M", "Only GPUs with at most M MB of memory used.", is_local=True,
                 is_for_gpu=True),
    SubmitOption("max-power-w", "number", "W", "Only GPUs that draw no more than W watts.", is_local=True,
                 is_for_gpu=True),
    SubmitOption("priority", "whole", "N", "Higher starts earlier.", note="0", least=-MAX_PRIORITY, most=MAX_PRIORITY,
                 label="Priority"),
    SubmitOption("preempt", "flag", None, "Preempt jobs of lower priority; the default priority is 100 then.",
                 label="Urgent: preempt other jobs", is_local=True, is_for_gpu=True),
    SubmitOption("on-preempt", "choice", "WHAT", "When it is preempted itself: suspend, requeue or never.",
                 default="suspend", choices=("suspend", "requeue", "never")),
    SubmitOption("after", "ids", "IDS", "Start after all of these jobs have succeeded, such as 17 or 17-20.",
                 label="After"),
    SubmitOption("after-any", "ids", "IDS", "Start after all of these jobs have finished in any way."),
    SubmitOption("after-failed", "ids", "IDS", "Start after one of these jobs has failed."),
    SubmitOption("after-each", "ids", "IDS",
                 "Start each job of this array after the job of that array with the same index has succeeded."),
    SubmitOption("retries", "whole", "N", "Retry this often after a failure; out of memory does not count.",
                 default="0", least=0, most=1_000_000_000, label="Retries"),
    SubmitOption("retry-on", "texts", "CAUSES", "Retry only after these: failed, timeout, oom, device.",
                 note="failed,timeout,oom,device"),
    SubmitOption("retry-delay", "time", "TIME", "Wait this long before the first retry; it doubles, up to an hour.",
                 note="by the failure, 1s at first", least=0),
    SubmitOption("time-limit", "time", "TIME", "Stop it after this long, such as 4h or 30m.", label="Time limit"),
    SubmitOption("grace", "time", "TIME", "Time between the signal to stop and the kill.", default="10s", least=0),
    SubmitOption("signal", "text", "SIG[@TIME]",
                 "Signal it this long before its time limit and before a requeue, such as USR1@5m."),
    SubmitOption("duration", "time", "TIME", "Expected run time, for estimates of start times."),
    SubmitOption("name", "word", "TEXT", "Its name in the queue, in one word.", note="its command", label="Name"),
    SubmitOption("tag", "word", "TEXT", "Marks jobs that belong together: `gpuyard cancel tag=TEXT`.", label="Tag"),
    SubmitOption("array", "text", "RANGE",
                 "A job for each {index}: 0-99, 0-99:5 for every fifth, 0-99%8 for at most 8 at once.",
                 label="Array", makes_many=True),
    SubmitOption("sweep", "texts", "NAME=VALUES",
                 "A job for each {NAME}: lr=1e-3,1e-4, lr=1e-4..1e-1:log4 or seed=0..4; repeat for all combinations.",
                 label="Sweep", makes_many=True),
    SubmitOption("sample", "whole", "N", "Of a sweep, only N combinations, chosen at random.", least=1, most=1_000_000,
                 label="Random sample", makes_many=True),
    SubmitOption("seed", "whole", "S", "With --sample: another number chooses other combinations.", default="0",
                 least=-1_000_000_000, most=1_000_000_000, label="Seed of the sample", makes_many=True),
    SubmitOption("env", "texts", "NAME=VALUE", "Set an environment variable.", label="Environment variables"),
    SubmitOption("image", "text", "IMAGE", "Run it in a container of this image, with podman, docker or apptainer.",
                 label="Container image", is_local=True),
    SubmitOption("mount", "texts", "SRC[:DST][:ro]", "With --image: mount this file or folder, such as /data:ro.",
                 label="Mounts of the container", is_local=True),
    SubmitOption("container-option", "texts", "TEXT",
                 "With --image: passed to the tool, such as --container-option=--network=host.", is_local=True),
    SubmitOption("stdin", "text", "FILE", "Standard input.", note="empty"),
    SubmitOption("on-reboot", "choice", "WHAT", "When the machine reboots meanwhile: requeue, hold or fail.",
                 choices=("requeue", "hold", "fail")),
    SubmitOption("notify", "texts", "[EVENTS=]TARGET",
                 "Notify this command or URL: finished,failed,out-of-memory=TARGET."),
    SubmitOption("hold", "flag", None, "Hold it until `gpuyard release`.", label="Hold it until it is released"),
    SubmitOption("log-cap", "size", "SIZE", "Keep about this much of its output.", default="256M"),
    SubmitOption("output", "text", "PATTERN", "Append its output to this file, such as logs/%x-%j.out or run-{lr}.txt.",
                 note="a log of the queue", label="Output file"),
    SubmitOption("error", "text", "PATTERN", "Append its standard error to this file.", note="as its output"),
    SubmitOption("split-stderr", "flag", None, "Keep standard error in a log of its own, for `logs --stderr`."),
    SubmitOption("timestamps", "flag", None, "Begin each line of its output with the time."),
    SubmitOption("at", "text", "WHEN", "Start no earlier than this: 22:00, 2026-11-18T22:00, or +2h from now.",
                 label="Not before"),
    SubmitOption("stagger", "time", "TIME", "Time between the starts of the jobs of an array, a sweep or a file.",
                 default="0s", least=0, is_local=True),
    SubmitOption("concurrency", "whole", "N", "At most this many runs at once; makes it a batch.", least=1,
                 most=1_000_000_000, is_local=True, makes_many=True, is_for_batch=True),
    SubmitOption("smoothing", "time", "TIME", "Average load over this time.", default="5s", least=0,
                 is_for_batch=True),
    SubmitOption("steady", "time", "TIME", "A gate opens after this time within its bounds.", default="3s", least=0,
                 is_for_batch=True),
    SubmitOption("run-ram", "size", "SIZE", "Reserve this much RAM for each run.", is_for_batch=True),
    SubmitOption("output-root", "text", "DIR", "Folder of all runs, whose disk must have free space.",
                 is_for_batch=True),
    SubmitOption("sample-log", "text", "FILE", "Write the measured load there.", is_for_batch=True),
)  # fmt: skip

SUBMIT_OPTIONS = {option.name: option for option in _TABLE}
_MANY = "submit the jobs again with it"
# The options that only a submission takes, and what to do instead.
NOT_EDITED = {
    "array": _MANY, "sweep": _MANY, "stagger": _MANY, "concurrency": _MANY,
    "hold": "use `gpuyard hold` and `release`",
    **dict.fromkeys(("after", "after-any", "after-failed", "after-each"), "cancel it, and submit it again with it"),
}  # fmt: skip
