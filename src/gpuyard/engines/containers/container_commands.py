"""The command lines of podman, docker and apptainer: which tool is installed, how it maps exactly the devices of a
job, and how it runs a program.

- Variables enter by name (`--env NAME`): the tool takes their values from its own environment. Command lines are
  visible to all users in `ps`; the values may be secrets.
- The user, the groups and the working folder are as on the host.
- The container has a PID namespace of its own, so that all its processes end with its first one. `--init` makes that
  one a small init, which passes signals on: a program that is process 1 ignores SIGTERM by default.
- Apptainer starts the program as a child process, with the environment, the user and the home of the host. There is
  no container to remove. It maps all devices of a vendor; the program sees its own by variables, as on the host.
- NVIDIA: podman maps by CDI, the names in the specs that `nvidia-ctk cdi generate` writes (UUIDs or indexes,
  depending on its version), docker by `--gpus`. AMD and Intel: the cards' render nodes, and AMD's /dev/kfd.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from gpuyard.errors import UserError
from gpuyard.model.container import CONTAINER_TOOLS, Container, Mount
from gpuyard.model.machine_snapshot import Device, Vendor

# Where podman looks for `catatonit`, by its version and its distribution.
_INITS = tuple(
    f"{folder}/catatonit"
    for folder in ("/usr/libexec/podman", "/usr/local/libexec/podman", "/usr/lib/podman", "/usr/local/lib/podman")
)


def installed_tools(path: str | None = None) -> list[str]:
    """Return the installed tools on a PATH, the preferred one first."""
    return [tool for tool in CONTAINER_TOOLS if shutil.which(tool, path=path)]


def choose_tool(configured: str, path: str | None = None) -> str:
    """Return the tool for a job's container: the configured one, or for "auto" the first that is installed."""
    found = installed_tools(path)
    if configured == "auto" and found:
        return found[0]
    if configured in found:
        return configured
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
    return any(map(os.path.exists, _INITS)) or shutil.which("catatonit") is not None


_CDI_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
_CDI_KIND = "nvidia.com/gpu"
_CDI_NAME = re.compile(r"""["']?name["']?:\s*["']?([\w:.-]+)""")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
# The NVIDIA runtime would otherwise map all cards if the image asks for them, as most of NVIDIA's do.
_NO_MORE_NVIDIA = ("--env", "NVIDIA_VISIBLE_DEVICES=void")


def device_options(tool: str, devices: Sequence[Device]) -> tuple[str, ...]:
    """Return the options of the tool that map these devices. Raises UserError if that is not possible."""
    real = [device for device in devices if not device.is_simulated]
    nvidia = [device for device in real if device.vendor is Vendor.NVIDIA]
    with_nodes = [device for device in real if device.vendor in (Vendor.AMD, Vendor.INTEL)]
    has_amd = any(device.vendor is Vendor.AMD for device in with_nodes)
    if tool == "apptainer":
        return (*(["--nv"] if nvidia else []), *(["--rocm"] if has_amd else []))
    nodes = [*(["/dev/kfd"] if has_amd else []), *(node for device in with_nodes for node in render_nodes(device))]
    return (*_nvidia_options(tool, nvidia), *(text for node in dict.fromkeys(nodes) for text in ("--device", node)))


def _nvidia_options(tool: str, devices: Sequence[Device]) -> list[str]:
    if not devices:
        return list(_NO_MORE_NVIDIA)
    if tool == "docker":
        ids = ",".join(device.id for device in devices)
        return ["--gpus", f'"device={ids}"']  # a value of CSV: the quotes belong to it
    known = cdi_names()
    names = [f"{_CDI_KIND}={_name(device, known)}" for device in devices]
    return [*_NO_MORE_NVIDIA, *(text for name in names for text in ("--device", name))]


def _name(device: Device, known: frozenset[str]) -> str:
    index = "" if device.index is None or device.parent is not None else str(device.index)
    found = next((name for name in (device.id, index, f"gpu{index}") if name in known), None)
    if found is None:
        raise UserError(
            f"podman has no CDI description of the GPU {device.id}",
            hint="write one: sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
        )
    return found


def cdi_names() -> frozenset[str]:
    """Return the names of NVIDIA devices in the machine's CDI specs."""
    names: set[str] = set()
    for folder in _CDI_FOLDERS:
        try:
            files = [path for path in folder.iterdir() if path.suffix in (".yaml", ".json")]
            texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
        except OSError:
            continue
        names.update(name for text in texts if _CDI_KIND in text for name in _CDI_NAME.findall(text))
    return frozenset(names)


def render_nodes(device: Device) -> list[str]:
    """Return the device files of a card, such as /dev/dri/renderD128. Raises UserError if the kernel has none."""
    folder = _PCI_DEVICES / (device.pci_bus_id or "unknown").lower() / "drm"
    try:
        nodes = sorted(entry.name for entry in folder.iterdir() if entry.name.startswith("renderD"))
    except OSError:
        nodes = []
    if not nodes:
        raise UserError(
            f"the device files of the GPU {device.id} were not found in {folder}",
            hint="see whether the kernel's driver is loaded",
        )
    return [f"/dev/dri/{node}" for node in nodes]


class HostUser(Struct, frozen=True, kw_only=True):
    uid: int
    gid: int
    groups: tuple[int, ...] = ()


class ContainedProgram(Struct, frozen=True, kw_only=True):
    """What runs in a container. `devices` are options of the tool that map devices. `has_init`: podman finds an init.
    `shm_mb` is the size of /dev/shm, which data loaders use: 64 MB by default, which is too little."""

    container: Container
    name: str
    command: tuple[str, ...]
    cwd: str
    variables: tuple[str, ...]
    user: HostUser
    labels: tuple[tuple[str, str], ...] = ()
    devices: tuple[str, ...] = ()
    shm_mb: int = 0
    has_stdin: bool = False
    has_init: bool = True


def container_name(queue: str, record: str) -> str:
    """Return a name that no other queue uses. `record` names the attempt."""
    return f"gpuyard-{hashlib.sha256(queue.encode(errors='surrogateescape')).hexdigest()[:8]}-{record}"


def container_command(program: ContainedProgram) -> tuple[str, ...]:
    if program.container.tool == "apptainer":
        return _apptainer(program)
    return _podman_or_docker(program)


def remove_command(tool: str, name: str) -> tuple[str, ...]:
    """Return the command that kills and removes a container; empty for a tool that leaves none behind."""
    if tool == "apptainer":
        return ()
    return (tool, "rm", "--force", "--ignore", "--time", "0", name) if tool == "podman" else (tool, "rm", "-f", name)


def _podman_or_docker(program: ContainedProgram) -> tuple[str, ...]:
    container = program.container
    is_podman = container.tool == "podman"
    options = ["--rm", "--name", program.name, "--log-driver", "none"]
    options += [text for label, value in program.labels for text in ("--label", f"{label}={value}")]
    options += _podman_user(program.user) if is_podman else _docker_user(program.user)
    if program.has_init or not is_podman:
        options.append("--init")
    if program.has_stdin:
        options.append("--interactive")
    if program.shm_mb:
        options += ["--shm-size", f"{program.shm_mb}m"]
    options += program.devices
    options += [text for mount in _all_mounts(program) for text in ("--mount", _mount_text(mount, "target"))]
    options += [text for name in program.variables for text in ("--env", name)]
    return (container.tool, "run", *options, "--workdir", program.cwd, *container.options, container.image,
            *program.command)  # fmt: skip


def _podman_user(user: HostUser) -> list[str]:
    """Rootless podman maps this user to the same number in the container; root's podman maps no user.

    SELinux would hide mounts and devices from the program, or relabel the user's files."""
    keep = ["--userns", "keep-id", "--group-add", "keep-groups"] if user.uid else _docker_groups(user)
    return [*keep, "--user", f"{user.uid}:{user.gid}", "--security-opt", "label=disable"]


def _docker_user(user: HostUser) -> list[str]:
    return ["--user", f"{user.uid}:{user.gid}", *_docker_groups(user), "--security-opt", "label=disable"]


def _docker_groups(user: HostUser) -> list[str]:
    return [text for group in user.groups if group != user.gid for text in ("--group-add", str(group))]


def _apptainer(program: ContainedProgram) -> tuple[str, ...]:
    options = [text for mount in _all_mounts(program) for text in ("--mount", _mount_text(mount, "destination"))]
    return ("apptainer", "--quiet", "exec", *program.devices, *options, "--pwd", program.cwd,
            *program.container.options, program.container.image, *program.command)  # fmt: skip


def _all_mounts(program: ContainedProgram) -> list[Mount]:
    """Return the mounts, with the working folder first unless another mount is there."""
    given = program.container.mounts
    if program.cwd == "/" or any(mount.target == program.cwd for mount in given):
        return list(given)
    return [Mount(source=program.cwd, target=program.cwd), *given]


def _mount_text(mount: Mount, target_key: str) -> str:
    """Return the value of --mount, a line of CSV. Unlike --volume it fails if the source does not exist."""
    fields = ["type=bind", f"source={mount.source}", f"{target_key}={mount.target}"]
    return ",".join(map(_csv_field, [*fields, *(["ro"] if mount.is_read_only else [])]))


def _csv_field(text: str) -> str:
    quoted = text.replace('"', '""')
    return f'"{quoted}"' if quoted != text or "," in text else text
