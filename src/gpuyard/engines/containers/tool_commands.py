"""The command lines of podman, docker and apptainer. Pure.

- Variables enter by name (`--env NAME`): the tool takes their values from its own environment. Command lines are
  visible to all users in `ps`; the values may be secrets.
- The user, the groups and the working folder are as on the host.
- The container has a PID namespace of its own, so that all its processes end with its first one. `--init` makes that
  one a small init, which passes signals on: a program that is process 1 ignores SIGTERM by default.
- Apptainer starts the program as a child process, with the environment, the user and the home of the host. There is no
  container to remove.
"""

import hashlib

from msgspec import Struct

from gpuyard.core.job.container import Container, Mount


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
