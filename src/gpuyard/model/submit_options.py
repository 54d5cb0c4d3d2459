"""The options of a submission, in one table of plain data: what an option is called, which field of a job has it, and
how `gpuyard show` tells it.

`gpuyard submit` with its help, the HTTP body, `Client.submit`, `edit`, `resubmit`, `show` and the form of the web page
are made from it. It imports nothing slow, because the command line reads it in about a millisecond.
"""

from gpuyard.model.option import Option

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Priorities are from -MAX_PRIORITY to MAX_PRIORITY.
MAX_PRIORITY = 1_000_000


class SubmitOption(Option):
    """An option of `gpuyard submit`, or of a batch.

    `field` is where a job's spec, and the daemon's answer about a job, have the value: "time_limit_s" or "need.model".
    None: `submission.py` and `resubmit.py` parse and find it in a way of its own. `shown` is the line of `show` that
    tells it, "" if none does: one that `show.py` writes itself, or else the value of the field, in `text` or as its
    kind is written. `label` is what the form of the web page calls it.

    `is_local`: only this machine can fulfil it, and not another engine. `is_for_gpu`: meaningless without a GPU.
    `makes_many`: one submission becomes many jobs. `is_for_batch`: only a batch takes it, and `gpuyard submit` does
    not. `is_sent` is False for an option of the command line alone.
    """

    def __init__(  # noqa: PLR0913 - the columns of the table
        self,
        *columns: "Any",
        field: str | None = None,
        shown: str = "",
        text: str | None = None,
        label: str | None = None,
        is_local: bool = False,
        is_for_gpu: bool = False,
        makes_many: bool = False,
        is_for_batch: bool = False,
        is_sent: bool = True,
        **others: "Any",
    ) -> None:
        super().__init__(*columns, **others)
        self.field, self.shown, self.text, self.label = field, shown, text, label
        self.is_local, self.is_for_gpu, self.makes_many = is_local, is_for_gpu, makes_many
        self.is_for_batch, self.is_sent = is_for_batch, is_sent


_Option = SubmitOption
# By the headings of the help.
_TABLE = {
    "Common options": (
        _Option("gpus", "whole", "N", "Number of GPUs; 0 for none.", default="1", least=0, most=1024, label="GPUs",
                field="need.devices", shown="GPUs"),
        _Option("vram", "size", "SIZE", "Reserve this much memory on each GPU, such as 8G.", shown="memory",
                note="learned from past runs", label="Memory on each GPU", is_for_gpu=True),
        _Option("time-limit", "time", "TIME", "Stop it after this long, such as 4h or 30m.", label="Time limit",
                field="time_limit_s", shown="time limit"),
        _Option("name", "word", "TEXT", "Its name in the queue, in one word.", note="its command", label="Name",
                field="name", shown="name"),
        _Option("priority", "whole", "N", "Higher starts earlier.", note="0", least=-MAX_PRIORITY, most=MAX_PRIORITY,
                label="Priority", shown="priority"),
        _Option("after", "ids", "IDS", "Start after all of these jobs have succeeded, such as 17 or 17-20.",
                label="After", shown="after"),
        _Option("retries", "whole", "N", "Retry this often after a failure; out of memory does not count.",
                default="0", least=0, most=1_000_000_000, label="Retries", field="retries", shown="retries"),
        _Option("array", "text", "RANGE",
                "A job for each {index}: 0-99, 0-99:5 for every fifth, 0-99%8 for at most 8 at once.",
                label="Array", makes_many=True, shown="array"),
        _Option("sweep", "texts", "NAME=VALUES",
                "A job for each {NAME}: lr=1e-3,1e-4, lr=1e-4..1e-1:log4 or seed=0..4; repeat for all combinations.",
                label="Sweep", makes_many=True, shown="values"),
        _Option("from", "text", "FILE",
                "A command per line; with a command, a CSV file whose columns fill in its {NAMES}.", is_sent=False),
        _Option("follow", "flag", None, "Print its output until it has finished; exit status as with --wait.",
                short="f", is_sent=False),
        _Option("dry-run", "flag", None, "Check it and print what would be submitted; submit nothing.", is_sent=False),
    ),
    "Memory, CPUs and disks": (
        _Option("exclusive", "flag", None, "Use the GPU alone.", label="Use the GPU alone", shown="memory",
                is_for_gpu=True),
        _Option("ram", "size", "SIZE", "Reserve this much RAM, such as 8G.", note="learned from past runs",
                label="RAM", shown="RAM"),
        _Option("cpus", "whole", "N", "Reserve this many CPUs, and set OMP_NUM_THREADS to it.", least=1, most=100_000,
                field="cpus", shown="CPUs"),
        _Option("min-free-mem-mb", "number", "M", "Start with at least M MB of RAM available.",
                field="need.min_host_memory_mb", shown="limits", text="at least {:g} MB of RAM available"),
        _Option("min-free-disk", "size", "SIZE",
                "Start with at least this much free on the disks that it writes to; 0: no limit.",
                note="1G, or the configuration's", least=0, is_local=True, field="disk.min_free_mb"),
        _Option("max-cpu", "number", "P", "Start at no more than P percent CPU use.", most=100, is_local=True,
                field="need.max_cpu_percent", shown="limits", text="CPU use up to {:g}%"),
    ),
    "Which GPUs": (
        _Option("device", "text", "LIST", "Only these GPUs, such as 0,2, amd:0 or a GPU's id.", is_local=True,
                is_for_gpu=True),
        _Option("vendor", "choice", "NAME", "Only GPUs of this vendor: nvidia, amd, intel or apple.",
                note="that of the largest GPU", choices=("nvidia", "amd", "intel", "apple", "simulated"),
                is_for_gpu=True, field="need.vendor", shown="limits", text="{} GPUs"),
        _Option("gpu-name", "text", "TEXT", "Only GPUs whose name contains this, such as H100.", is_for_gpu=True,
                field="need.model", shown="limits", text="GPUs named {}"),
        _Option("linked", "flag", None, "Only GPUs that NVLink or XGMI joins; waits for such a set.",
                label="Only GPUs joined by NVLink", is_local=True, is_for_gpu=True, field="need.is_linked",
                shown="limits", text="GPUs joined by NVLink or XGMI"),
        _Option("same-node", "flag", None, "Only GPUs of one NUMA node; waits for such a set.",
                label="Only GPUs of one NUMA node", is_local=True, is_for_gpu=True, field="need.is_on_one_node",
                shown="limits", text="GPUs of one NUMA node"),
        _Option("max-gpu", "number", "P", "Only GPUs at no more than P percent use.", most=100, is_local=True,
                is_for_gpu=True, field="need.max_utilization_percent", shown="limits", text="GPU use up to {:g}%"),
        _Option("max-gpu-mem-mb", "number", "M", "Only GPUs with at most M MB of memory used.", is_local=True,
                is_for_gpu=True, field="need.max_memory_used_mb", shown="limits",
                text="GPU memory used up to {:g} MB"),
        _Option("max-power-w", "number", "W", "Only GPUs that draw no more than W watts.", is_local=True,
                is_for_gpu=True, field="need.max_power_w", shown="limits", text="power up to {:g} W"),
    ),
    "Order and preemption": (
        _Option("after-any", "ids", "IDS", "Start after all of these jobs have finished in any way.", shown="after"),
        _Option("after-failed", "ids", "IDS", "Start after one of these jobs has failed.", shown="after"),
        _Option("after-each", "ids", "IDS",
                "Start each job of this array after the job of that array with the same index has succeeded.",
                shown="after"),
        _Option("hold", "flag", None, "Hold it until `gpuyard release`.", label="Hold it until it is released"),
        _Option("tag", "word", "TEXT", "Marks jobs that belong together: `gpuyard cancel tag=TEXT`.", label="Tag",
                field="tag", shown="tag"),
        _Option("preempt", "flag", None, "Preempt jobs of lower priority; the default priority is 100 then.",
                label="Urgent: preempt other jobs", is_local=True, is_for_gpu=True, field="preempts",
                shown="preempts", text="jobs of lower priority"),
        _Option("on-preempt", "choice", "WHAT", "When it is preempted itself: suspend, requeue or never.",
                default="suspend", choices=("suspend", "requeue", "never"), field="on_preempt", shown="if preempted"),
    ),
    "Time and retries": (
        _Option("at", "text", "WHEN", "Start no earlier than this: 22:00, 2026-11-18T22:00, or +2h from now.",
                label="Not before", shown="not before"),
        _Option("in", "text", "TIME", "Start no earlier than after this time, such as 2h30m.", is_sent=False),
        _Option("duration", "time", "TIME", "Expected run time: a short job may go ahead of one that waits.",
                field="duration_s", shown="expected duration"),
        _Option("grace", "time", "TIME", "Time between the signal to stop and the kill.", default="10s", least=0,
                field="grace_s", shown="grace"),
        _Option("signal", "text", "SIG[@TIME]",
                "Signal it this long before its time limit and before a requeue, such as USR1@5m.",
                shown="signal before it is stopped"),
        _Option("retry-on", "texts", "CAUSES", "Retry only after these: failed, timeout, oom, device.",
                note="failed,timeout,oom,device", shown="retried after"),
        _Option("retry-delay", "time", "TIME", "Wait this long before the first retry; it doubles, up to an hour.",
                note="by the failure, 1s at first", least=0, field="retry_delay_s", shown="retry delay"),
        _Option("on-reboot", "choice", "WHAT", "When the machine reboots meanwhile: requeue, hold or fail.",
                choices=("requeue", "hold", "fail"), field="on_reboot", shown="after a reboot"),
    ),
    "Output and notifications": (
        _Option("wait", "flag", None, "Wait until it has finished; the exit status is that of the job.", is_sent=False),
        _Option("output", "text", "PATTERN", "Append its output to this file, such as logs/%x-%j.out or run-{lr}.txt.",
                note="a log of the queue", label="Output file", field="output", shown="output"),
        _Option("error", "text", "PATTERN", "Append its standard error to this file.", note="as its output",
                field="error", shown="error"),
        _Option("split-stderr", "flag", None, "Keep standard error in a log of its own, for `logs --stderr`.",
                field="split_stderr", shown="standard error"),
        _Option("timestamps", "flag", None, "Begin each line of its output with the time.", field="timestamps",
                shown="timestamps", text="each line of output begins with the time"),
        _Option("log-cap", "size", "SIZE", "Keep about this much of its output.", default="256M", field="log_cap_mb",
                shown="log cap"),
        _Option("notify", "texts", "[EVENTS=]TARGET",
                "Notify this command or URL: finished,failed,out-of-memory=TARGET.", shown="notify"),
        _Option("json", "flag", None, "Print JSON with stable keys.", is_sent=False),
    ),
    "Arrays and sweeps": (
        _Option("sample", "whole", "N", "Of a sweep, only N combinations, chosen at random.", least=1,
                most=1_000_000, label="Random sample", makes_many=True),
        _Option("seed", "whole", "S", "With --sample: another number chooses other combinations.", default="0",
                least=-1_000_000_000, most=1_000_000_000, label="Seed of the sample", makes_many=True),
        _Option("stagger", "time", "TIME", "Time between the starts of the jobs of an array, a sweep or a file.",
                default="0s", least=0, is_local=True),
    ),
    "Environment and code": (
        _Option("env", "texts", "NAME=VALUE", "Set an environment variable.", label="Environment variables",
                shown="environment"),
        _Option("cwd", "text", "DIR", "Working directory. [this one]", is_sent=False),
        _Option("stdin", "text", "FILE", "Standard input.", note="empty", field="stdin", shown="standard input"),
        _Option("snapshot", "flag", None,
                "Run the code as it is now: copy the Git work tree, or the folder without Git.", is_sent=False),
        _Option("no-snapshot", "flag", None,
                "Run the code as it is when the job starts. [if the configuration says nothing]", is_sent=False),
    ),
    "Containers": (
        _Option("image", "text", "IMAGE", "Run it in a container of this image, with podman, docker or apptainer.",
                label="Container image", is_local=True, shown="container"),
        _Option("mount", "texts", "SRC[:DST][:ro]", "With --image: mount this file or folder, such as /data:ro.",
                label="Mounts of the container", is_local=True, shown="container"),
        _Option("container-option", "texts", "TEXT",
                "With --image: passed to the tool, such as --container-option=--network=host.", is_local=True,
                shown="container"),
    ),
    "Clusters": (
        _Option("engine", "word", "NAME", "Where it runs: local, slurm or ray.", note="local, or the configuration's",
                shown="engine"),
        _Option("engine-option", "texts", "TEXT", "Passed to the engine, such as --engine-option=--partition=big.",
                field="engine_options", shown="engine options"),
    ),
    "": (
        _Option("concurrency", "whole", "N", "At most this many runs at once; makes it a batch.", least=1,
                most=1_000_000_000, is_local=True, makes_many=True, is_for_batch=True),
        _Option("smoothing", "time", "TIME", "Average load over this time.", default="5s", least=0,
                is_for_batch=True),
        _Option("steady", "time", "TIME", "A gate opens after this time within its bounds.", default="3s", least=0,
                is_for_batch=True),
        _Option("run-ram", "size", "SIZE", "Reserve this much RAM for each run.", is_for_batch=True),
        _Option("output-root", "text", "DIR", "Folder of all runs, whose disk must have free space.",
                is_for_batch=True, field="disk.output_root"),
        _Option("sample-log", "text", "FILE", "Write the measured load there.", is_for_batch=True),
    ),
}  # fmt: skip
_ALL = [option.but(heading=heading) for heading, options in _TABLE.items() for option in options]
SUBMIT_OPTIONS = {option.name: option for option in _ALL if option.is_sent}
# The options of `gpuyard submit`, with those of the command line alone.
COMMAND_LINE_OPTIONS = {option.name: option for option in _ALL if not option.is_for_batch}
_MANY = "submit the jobs again with it"
# The options that only a submission takes, and what to do instead.
NOT_EDITED = {
    "array": _MANY, "sweep": _MANY, "stagger": _MANY, "concurrency": _MANY,
    "hold": "use `gpuyard hold` and `release`",
    **dict.fromkeys(("after", "after-any", "after-failed", "after-each"), "cancel it, and submit it again with it"),
}  # fmt: skip
