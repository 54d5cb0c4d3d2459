"""Runs attempts in containers by podman, docker or apptainer, and removes each container at the end, however it ends.

- Variables enter by name (`--env NAME`): the tool takes their values from its own environment. Command lines are
  visible to all users in `ps`; the values may be secrets. The user, the groups and the working folder are the host's.
- The container has a PID namespace of its own, so that all its processes end with its first one. `--init` makes that
  one a small init, which passes signals on: a program that is process 1 ignores SIGTERM by default.
- Apptainer starts the program as a child process of the host: there is no container to remove. It maps all devices of a
  vendor; the program sees its own by variables.
- NVIDIA: podman maps by CDI, the names in the specs that `nvidia-ctk cdi generate` writes (UUIDs or indexes), docker by
  `--gpus`. AMD and Intel: the cards' render nodes, and AMD's /dev/kfd.
- A record, a small file, is written before a container can exist and removed when the container is gone. So a daemon
  that takes over removes what an earlier one left.
- The tool removes the container itself when the program ends (`--rm`); `TOOL rm` runs only after other ends. It is
  killed if it has not ended after 30 s, and tried again until the container is gone. So long, but for 10 s at most, the
  end of the attempt is held back, and with it its lease."""

import contextlib
import hashlib
import logging
import math
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpuyard.engines.common.hold_ends import Holds
from gpuyard.engines.common.program_outcome import TOOL_FAILED
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.container import CONTAINER_TOOLS, Container, Mount, variables_to_pass
from gpuyard.model.machine_snapshot import Device, Vendor
from gpuyard.model.units import MB
from gpuyard.output.progress_line import VARIABLE as PROGRESS_VARIABLE
from gpuyard.ports import Launch
from gpuyard.system.private_files import make_folder
from gpuyard.system.run_command import NotInTime, run_command
from gpuyard.system.system_limits import remedy_of


def installed_tools(path: str | None = None) -> list[str]:
    return [tool for tool in CONTAINER_TOOLS if shutil.which(tool, path=path)]


def choose_tool(configured: str, path: str | None = None) -> str:
    """Return the tool for a job's container: the configured one, or for "auto" the first that is installed."""
    found = installed_tools(path)
    if found and configured in ("auto", *found):
        return found[0] if configured == "auto" else configured
    if configured == "auto":
        raise UserError(
            "--image needs podman, docker or apptainer, and none of them is on PATH",
            hint="install podman, or add the tool's folder to PATH",
        )
    raise UserError(
        f"--image: {configured}, the tool in [containers] of config.toml, is not on PATH",
        hint=f"install it, or set the tool to {' or '.join(found) or 'another'} in config.toml",
    )


def has_podman_init() -> bool:
    """Return whether podman finds `catatonit`, which it looks for by its version and its distribution."""
    folders = ("/usr/libexec/podman", "/usr/local/libexec/podman", "/usr/lib/podman", "/usr/local/lib/podman")
    return any(os.path.exists(f"{folder}/catatonit") for folder in folders) or shutil.which("catatonit") is not None


_CDI_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
_CDI_KIND = "nvidia.com/gpu"
_CDI_NAME = re.compile(r"""["']?name["']?:\s*["']?([\w:.-]+)""")
_PCI_DEVICES = Path("/sys/bus/pci/devices")


def device_options(tool: str, devices: Sequence[Device]) -> tuple[str, ...]:
    """Return the options of the tool that map these devices. Raises UserError if that is not possible."""
    real = [device for device in devices if not device.is_simulated]
    nvidia = [device for device in real if device.vendor is Vendor.NVIDIA]
    with_nodes = [device for device in real if device.vendor in (Vendor.AMD, Vendor.INTEL)]
    has_amd = any(device.vendor is Vendor.AMD for device in with_nodes)
    if tool == "apptainer":
        return (*(["--nv"] if nvidia else []), *(["--rocm"] if has_amd else []))
    names = [*(["/dev/kfd"] if has_amd else []), *(node for device in with_nodes for node in render_nodes(device))]
    if nvidia and tool == "docker":
        first = ("--gpus", f'"device={",".join(device.id for device in nvidia)}"')  # CSV: the quotes belong to it
    else:
        # The NVIDIA runtime would otherwise map all cards if the image asks for them, as most of NVIDIA's do.
        first = ("--env", "NVIDIA_VISIBLE_DEVICES=void")
        known = cdi_names() if nvidia else frozenset()
        names = [*(f"{_CDI_KIND}={_cdi_name(device, known)}" for device in nvidia), *names]
    return (*first, *(text for name in dict.fromkeys(names) for text in ("--device", name)))


def _cdi_name(device: Device, known: frozenset[str]) -> str:
    index = "" if device.index is None or device.parent is not None else str(device.index)
    for name in (device.id, index, f"gpu{index}"):
        if name in known:
            return name
    hint = "write one: sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
    raise UserError(f"podman has no CDI description of the GPU {device.id}", hint=hint)


def cdi_names() -> frozenset[str]:
    names: set[str] = set()
    for folder in _CDI_FOLDERS:
        with contextlib.suppress(OSError):
            files = [path for path in folder.iterdir() if path.suffix in (".yaml", ".json")]
            texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
            names.update(name for text in texts if _CDI_KIND in text for name in _CDI_NAME.findall(text))
    return frozenset(names)


def render_nodes(device: Device) -> list[str]:
    """Return the device files of a card, such as /dev/dri/renderD128. Raises UserError if the kernel has none."""
    folder, nodes = _PCI_DEVICES / (device.pci_bus_id or "unknown").lower() / "drm", []
    with contextlib.suppress(OSError):
        nodes = sorted(f"/dev/dri/{entry.name}" for entry in folder.iterdir() if entry.name.startswith("renderD"))
    if not nodes:
        raise UserError(
            f"the device files of the GPU {device.id} were not found in {folder}",
            hint="see whether the kernel's driver is loaded",
        )
    return nodes


class ContainedProgram(Struct, frozen=True, kw_only=True):
    """What runs in a container, as this user of the host. `devices` are options of the tool that map devices.
    `has_init`: podman finds an init. `shm_mb` is the size of /dev/shm, which data loaders use: 64 MB by default, which
    is too little."""

    container: Container
    name: str
    command: tuple[str, ...]
    cwd: str
    variables: tuple[str, ...]
    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    devices: tuple[str, ...] = ()
    shm_mb: int = 0
    has_stdin: bool = False
    has_init: bool = True


def container_name(queue: str, record: str) -> str:
    """Return a name that no other queue uses. `record` names the attempt."""
    return f"gpuyard-{hashlib.sha256(queue.encode(errors='surrogateescape')).hexdigest()[:8]}-{record}"


def remove_command(tool: str, name: str) -> tuple[str, ...]:
    """Return the command that kills and removes a container; empty for a tool that leaves none behind."""
    if tool == "apptainer":
        return ()
    return (tool, "rm", "--force", "--ignore", "--time", "0", name) if tool == "podman" else (tool, "rm", "-f", name)


def container_command(program: ContainedProgram) -> tuple[str, ...]:
    container, uid, gid = program.container, program.uid, program.gid
    is_podman, mounts = container.tool == "podman", container.mounts
    if program.cwd != "/" and not any(mount.target == program.cwd for mount in mounts):
        mounts = (Mount(source=program.cwd, target=program.cwd), *mounts)
    to = "destination" if container.tool == "apptainer" else "target"
    mounted = [text for mount in mounts for text in ("--mount", _csv_line(mount, to))]
    if container.tool == "apptainer":
        return ("apptainer", "--quiet", "exec", *program.devices, *mounted, "--pwd", program.cwd,
                *container.options, container.image, *program.command)  # fmt: skip
    options = ["--rm", "--name", program.name, "--log-driver", "none"]
    options += [text for label, value in program.labels for text in ("--label", f"{label}={value}")]
    # Rootless podman maps this user to the same number in the container; root's podman maps no user.
    groups = [text for group in program.groups if group != gid for text in ("--group-add", str(group))]
    keep = ["--userns", "keep-id", "--group-add", "keep-groups"] if uid else groups
    own_ids = ["--user", f"{uid}:{gid}"]
    options += [*keep, *own_ids] if is_podman else [*own_ids, *groups]
    # SELinux would hide mounts and devices from the program, or relabel the user's files.
    options += ["--security-opt", "label=disable"]
    options += ["--init"] if program.has_init or not is_podman else []
    options += ["--interactive"] if program.has_stdin else []
    options += ["--shm-size", f"{program.shm_mb}m"] if program.shm_mb else []
    options += [*program.devices, *mounted, *(text for name in program.variables for text in ("--env", name))]
    return (container.tool, "run", *options, "--workdir", program.cwd, *container.options, container.image,
            *program.command)  # fmt: skip


def _csv_line(mount: Mount, target: str) -> str:
    """Return the value of --mount, a line of CSV. Unlike --volume it fails if the source does not exist."""
    fields = ["type=bind", f"source={mount.source}", f"{target}={mount.target}"]
    quoted = [each.replace('"', '""') for each in [*fields, *(["ro"] if mount.is_read_only else [])]]
    return ",".join(f'"{each}"' if '"' in each or "," in each else each for each in quoted)


_log = logging.getLogger(__name__)
_LIMIT_S = 30.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 10.0, 600.0


_HOLD_S = 10.0


class RemoveCommand(Struct, frozen=True):
    """The command that removes a container, whose name is the last argument."""

    command: tuple[str, ...]
    environment: dict[str, str]


class StartedContainers:
    """For one thread of one process at a time. Keys are those of attempts, such as `17.1`."""

    def __init__(self, folder: str, wake: Callable[[], None]) -> None:
        """`wake` is called, from any thread, when `collect` should be called."""
        self._folder = folder
        self._records: dict[str, RemoveCommand] = {}  # by the name of the record, such as `17.1-a0b1`
        self._removals: Holds[None] = Holds(wake)
        self._problems: dict[str, str] = {}  # why a container is still there, and what to do

    def contain(self, launch: Launch, environment: Mapping[str, str], queue: str) -> Launch:
        """Return the launch of the tool that runs the program in its container; record the container."""
        container = launch.container
        if container is None:
            return launch
        # Random: an attempt whose start was not recorded is prepared again, while its first container is removed.
        record = f"{launch.key}-{os.urandom(2).hex()}"
        name = container_name(queue, record)
        command = container_command(
            ContainedProgram(
                container=_with_progress_file(container, environment),
                name=name,
                command=launch.command,
                cwd=launch.cwd,
                variables=tuple(variables_to_pass(environment)),
                uid=os.getuid(),
                gid=os.getgid(),
                groups=tuple(os.getgroups()),
                labels=(("gpuyard.job", str(launch.job_id)), ("gpuyard.attempt", str(launch.attempt)),
                        ("gpuyard.queue", queue)),
                devices=device_options(container.tool, launch.devices),
                shm_mb=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // MB // 2,
                has_stdin=launch.stdin is not None,
                has_init=has_podman_init(),
            )
        )  # fmt: skip
        removal = remove_command(container.tool, name)
        if removal:
            # What the tool needs to find the container again.
            names = re.compile(r"(PATH|HOME|TMPDIR)$|XDG_|DOCKER_|CONTAINER|PODMAN_|STORAGE_")
            self._record(record, RemoveCommand(removal, {k: v for k, v in environment.items() if names.match(k)}))
        return replace(launch, command=command)

    def take_over(self, live: Collection[str]) -> None:
        """Read the records of an earlier daemon, and remove the containers of attempts that are not live."""
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._folder):
                with contextlib.suppress(OSError, msgspec.DecodeError):
                    self._records[name] = msgspec.json.decode(Path(self._folder, name).read_bytes(), type=RemoveCommand)
        for name in [name for name in self._records if _key(name) not in live]:
            self._holds(name, 0.0)

    def has(self, key: str) -> bool:
        return any(_key(name) == key for name in self._records)

    def end(self, key: str, status: int | None, kill: Callable[[], int]) -> bool:
        """Note the end of an attempt, with its exit status if that is known; remove its container if it may be left.
        Return whether to wait for the removal; then call it again later. After 10 s it returns False, and calls `kill`,
        which kills the attempt's processes and returns how many."""
        names = [name for name in self._records if _key(name) == key]
        if status is not None and status < TOOL_FAILED:  # else the tool failed, or was killed
            for name in names:
                self._forget(name)
            return False
        if any([self._holds(name, _HOLD_S) for name in names]):  # noqa: C419 - begins all
            return True
        if left := [self._records[name].command[-1] for name in names if not self._removals.begun[name].is_done]:
            _log.warning(
                "the container %s of job %s was not removed within %g s: %d of its processes were killed, and its GPUs "
                "are free for other jobs", left[0], key.partition(".")[0], _HOLD_S, kill()
            )  # fmt: skip
        return False

    def collect(self) -> None:
        """Forget the containers that are gone, and begin removals that could not begin yet."""
        for name in [name for name in self._removals.begun if not self._holds(name, math.inf)]:
            self._forget(name)

    def next_check_s(self) -> float | None:
        """Return after how many seconds the next end is no longer held back; None if none is."""
        now = time.monotonic()
        held_s = (each.since + _HOLD_S - now for each in self._removals.begun.values())
        return min((each for each in held_s if each > 0), default=None)

    def problems(self) -> list[str]:
        return list(self._problems.values())

    def _holds(self, name: str, most_s: float) -> bool:
        return self._removals.holds(name, partial(self._remove, name, self._records[name]), most_s)

    def _remove(self, name: str, removal: RemoveCommand) -> None:
        """Remove a container; tried again until it has succeeded."""
        container, delay_s, warn_at = removal.command[-1], _FIRST_RETRY_S, 0.0
        while True:
            try:
                status, _, said = run_command(removal.command, removal.environment, _LIMIT_S)
            except OSError as error:
                problem = str(error)
            except NotInTime:
                problem = f"it did not end within {_LIMIT_S:g} s"
            else:
                if status == 0 or b"no such container" in said.lower():
                    return
                problem = said.decode(errors="replace").strip() or f"exit status {status}"
            command = shlex.join(removal.command)
            self._problems[name] = f"the container {container} cannot be removed ({problem}): try `{command}`"
            if time.monotonic() >= warn_at:
                warn_at = time.monotonic() + 3600.0
                _log.warning("the container %s was not removed, which is tried again: %s", container, problem)
            time.sleep(delay_s)
            delay_s = min(_LONGEST_RETRY_S, delay_s * 2)

    def _record(self, name: str, removal: RemoveCommand) -> None:
        path = f"{self._folder}/{name}"
        try:
            make_folder(self._folder, is_closed=True)
            Path(path).write_bytes(msgspec.json.encode(removal))
        except OSError as error:
            raise EnvironmentFault(f"{path} cannot be written: {error.strerror}", hint=remedy_of(error)) from error
        self._records[name] = removal

    def _forget(self, name: str) -> None:
        for each in (self._records, self._removals.begun, self._problems):
            each.pop(name, None)
        with contextlib.suppress(OSError):
            os.unlink(f"{self._folder}/{name}")


def _key(name: str) -> str:
    return name.rpartition("-")[0]


def _with_progress_file(container: Container, environment: Mapping[str, str]) -> Container:
    """Mount the file in which the program may write its progress. It is made first: a mount needs its source."""
    path = environment.get(PROGRESS_VARIABLE)
    if path is None:
        return container
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    except OSError as error:  # such as a full disk: the program runs without it
        _log.warning("%s cannot be made, so the container's program cannot write its progress: %s", path, error)
        return container
    return replace(container, mounts=(*container.mounts, Mount(source=path, target=path)))
