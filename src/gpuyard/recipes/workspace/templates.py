"""The files of a new workspace, as text.

A line of a configuration that begins with `#` and a key shows that key's default; to set it is to take the `#` away.
"""

import json
import re
import shlex

from gpuyard.recipes.workspace.settings import KINDS

_HEAD = """\
# What the sweep of this workspace is made of; `./scheduler.sh config` shows what is in force, and where from.
# A line behind a # shows a default: take the # away to set it. Paths are relative to this folder, or absolute.
"""

_NEW_KEYS_HEAD = """\
#
# What can be set besides, each with its default:
"""

_COMMENTS_AT = 37
_SECTIONS = """
# What is run: PYTHON_ENV SCRIPT_PATH --config_path CONFIG_DIR/NAME.yml, in WORK_DIR.
task_name: train                      # names logs and sessions [the folder's name]
#work_dir: .
script_path: train.py
#config_dir: configs                  # a YAML file for each task
#config_pattern: "*.yml"              # which of the files there are tasks
#output_dir: out                      # NAME_completed.txt here says that a task is done
#python_env: python                   # the interpreter: a program on PATH, or a path
#conda_env: ""                        # a conda environment, by name or path; activated at `start`
#env: {}                              # variables for each task, as {NAME: value}

# Where and when.
#max_jobs_per_gpu: 2                  # tasks of this workspace on one GPU at once
#gpu_count: all                       # all, or how many GPUs to use
#cuda_visible_devices_var: CUDA_VISIBLE_DEVICES # the variable that names a task's GPUs
#vram: ""                             # GPU memory of a task, such as 8G [learned]
#priority: 0                          # higher goes first
#timeout: ""                          # a task is ended after this time, such as 4h [never]
#startup_delay: 1                     # seconds between two starts
#command_delay: 0.5                   # seconds from a session to its program
#check_interval: 30                   # seconds between two looks at a marker
#exit_grace: 60                       # seconds that a program may go on after its marker
#engine: default                      # local, slurm or ray [what the queue's configuration says]

# When a task fails, and when all is done.
#auto_restart_failed: false
#max_retries: 3
#notify: ""                           # a command that is run when the sweep is over
#hook: ""                             # a command that is run before and after each task
#hook_timeout: 60                     # seconds after which it is ended

# Sessions and logs.
#sessions: tmux                       # tmux or none
#worker_prefix: ""                    # a task's session is WORKER_PREFIX_NAME_gpu0 [task_name]
#scheduler_session_suffix: _scheduler # and the view of all is in TASK_NAME_scheduler
#cleanup_on_complete: false           # whether a session is closed when its task is completed
#enable_logging: true
#log_dir: /tmp                        # LOG_DIR/train_logs/NAME.log, LOG_DIR/TASK_NAME_scheduler.log
"""

_SCRIPT = """\
#!/bin/sh
# The commands of this workspace, from any working directory: ./scheduler.sh help
# It only forwards to gpuyard; `gpuyard workspace init --force` makes it anew.

self=$0
case $self in
    /*) ;;
    *) self=./$self ;;
esac
# A link from elsewhere is followed; one in a workspace stands for that workspace. The x keeps newlines at the end.
while [ -L "$self" ] && [ ! -e "${self%/*}/scheduler_config.yml" ]; do
    target=$(readlink "$self" && echo x) || exit
    target=${target%??}
    case $target in
        /*) self=$target ;;
        *) self=${self%/*}/$target ;;
    esac
done
here=${self%/*}/

[ $# -gt 0 ] || set -- help
if command -v gpuyard >/dev/null 2>&1; then
    exec gpuyard workspace --workspace "$here" "$@"
fi
python=@PYTHON@
if "$python" -P -c 'import gpuyard' 2>/dev/null; then
    exec "$python" -P -m gpuyard workspace --workspace "$here" "$@"
fi
echo 'scheduler.sh: gpuyard is not on PATH, and the Python that made this workspace no longer has it' >&2
echo 'hint: install it (pip install gpuyard), or activate the environment that it is in' >&2
exit 127
"""


def scheduler_script(python: str) -> str:
    """`scheduler.sh`, with the interpreter to fall back on where `gpuyard` is not on PATH."""
    return _SCRIPT.replace("@PYTHON@", shlex.quote(python))


def configuration(task_name: str) -> str:
    """Every key, most of them as a comment with the default."""
    line = f"task_name: {json.dumps(task_name, ensure_ascii=False)}"
    return _HEAD + _SECTIONS.replace("task_name: train".ljust(_COMMENTS_AT), line.ljust(_COMMENTS_AT), 1)


def with_new_keys(text: str) -> str:
    """A configuration with the keys that it does not mention added as comments; as it is, where it has all."""
    mentioned = set(re.findall(r"^\s*#?\s*['\"]?(\w+)['\"]?\s*:", text, re.MULTILINE))
    missing = [line for key, line in _lines().items() if key not in mentioned]
    if not missing:
        return text
    line_end = "" if text.endswith("\n") or not text else "\n"
    return f"{text}{line_end}{_NEW_KEYS_HEAD}{''.join(missing)}"


def _lines() -> dict[str, str]:
    """Each key's line of the template, as a comment."""
    found = {}
    for line in _SECTIONS.splitlines():
        key = line.lstrip("#").partition(":")[0]
        if key in KINDS:
            found[key] = f"#{line.lstrip('#')}\n"
    return found
