"""The container that a job runs in; and commands that start a container themselves, outside their job."""

import posixpath
import re
from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.errors import UserError

# In the order in which `tool = "auto"` prefers them.
CONTAINER_TOOLS = ("podman", "docker", "apptainer")
# Variables that the tool itself reads: with --env they would change the tool, and not only the program.
_OF_TOOL = frozenset({"HOME", "PATH", "TMPDIR"})
_OF_TOOL_PREFIXES = ("XDG_", "LD_", "DOCKER_", "CONTAINER", "PODMAN_", "STORAGE_", "APPTAINER", "SINGULARITY")
# Variables that describe software, sockets and devices of the host, which a container does not have.
_OF_HOST = frozenset(
    {
        "PATH", "TMPDIR", "SHELL", "PYTHONHOME", "VIRTUAL_ENV", "HOSTNAME", "SSH_AUTH_SOCK", "DBUS_SESSION_BUS_ADDRESS",
        "XDG_RUNTIME_DIR", "NVIDIA_VISIBLE_DEVICES", "TMUX", "PWD", "OLDPWD", "SHLVL", "_",
    }
)  # fmt: skip
_OF_HOST_PREFIXES = ("LD_", "CONDA", "_CE_", "DOCKER_", "CONTAINER", "PODMAN_", "STORAGE_", "APPTAINER", "SINGULARITY")
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_SETS_VARIABLE = re.compile(r"--env|-[A-Za-z]*e")
_VARIABLE = re.compile(r"([^=]+=).+", re.DOTALL)
_SET_VARIABLE = re.compile(rf"((?:--env[= ]|-[A-Za-z]*e[= ]?)\s*{_VARIABLE.pattern[1:]}", re.DOTALL)
_IMAGE = re.compile(r"[^-\s]\S*")
# `docker run`, also after options of its own, as in `docker --context lab run`.
_BARE_RUN = re.compile(
    r"(?:^|[\s;&|(`'\"/])(docker|podman|nerdctl)(?:\s+-[\w-]+(?:[= ][^\s-]\S*)?)*"
    r"\s+(?:container\s+)?(?:run|exec|start|compose)(?:\s|$)"
)
_COMPOSE = re.compile(r"(?:^|[\s;&|(`'\"/])((?:docker|podman)-compose)\s")


class Mount(Struct, frozen=True, kw_only=True):
    source: str
    target: str
    is_read_only: bool = False

    def __str__(self) -> str:
        return f"{self.source}:{self.target}{':ro' if self.is_read_only else ''}"


class Container(Struct, frozen=True, kw_only=True):
    """`options` are passed to the tool. `tool` is chosen when the job is accepted."""

    image: str
    mounts: tuple[Mount, ...] = ()
    options: tuple[str, ...] = ()
    tool: str = ""

    @property
    def maps_devices(self) -> bool:
        """Whether the container has only the devices of its job. Apptainer shows all of the host."""
        return self.tool != "apptainer"


def parse_container(
    image: str | None, mounts: Sequence[str], options: Sequence[str], variables: Iterable[str], cwd: str
) -> Container | None:
    """Return the container of a submission with variables of these names; relative sources of mounts start in `cwd`."""
    if image is None:
        if mounts or options:
            raise UserError(
                f"--{'mount' if mounts else 'container-option'} is for a job in a container",
                hint="name its image with --image, or leave it out",
            )
        return None
    if not _IMAGE.fullmatch(image) or not image.isprintable():
        raise UserError(f"'{image}' is not an image", hint="write it as --image pytorch/pytorch:latest")
    for name in variables:
        if name in _OF_TOOL or name.startswith(_OF_TOOL_PREFIXES):
            raise UserError(
                f"--env {name} would change the container tool itself",
                hint=f"set it in the container: -- env {name}=VALUE COMMAND",
            )
    parsed = tuple(parse_mount(text, cwd) for text in mounts)
    targets = [mount.target for mount in parsed]
    twice = next((target for target in targets if targets.count(target) > 1), None)
    if twice is not None:
        raise UserError(f"--mount: {twice} in the container is given twice", hint="give each target once")
    if not all(map(str.isprintable, options)):
        raise UserError("--container-option takes plain text", hint="remove characters that cannot be printed")
    return Container(image=image, mounts=parsed, options=tuple(options))


def without_values(container: Container) -> Container:
    """Return the container as it is shown: without the values of variables that its options set (`--env=A=b`)."""
    shown, is_value = [], False
    for option in container.options:
        match = (_VARIABLE if is_value else _SET_VARIABLE).fullmatch(option)
        shown.append(option if match is None else f"{match[1]}…")
        is_value = _SETS_VARIABLE.fullmatch(option) is not None
    return replace(container, options=tuple(shown))


def parse_mount(text: str, cwd: str) -> Mount:
    """Parse SOURCE[:TARGET[:ro|:rw]]; the default target is the source's own path."""
    source, *rest = text.split(":")
    mode = rest.pop() if rest and rest[-1] in ("ro", "rw") else "rw"
    target = rest.pop(0) if rest else ""
    if not source or rest or not text.isprintable() or source.startswith("~") or (target and target[0] != "/"):
        raise UserError(
            f"--mount '{text}' is not SOURCE:TARGET", hint="write it as --mount /data/sets:/data:ro, with full paths"
        )
    source = posixpath.normpath(posixpath.join(cwd, source))
    target = posixpath.normpath(target or source)
    if target == "/":
        raise UserError(f"--mount '{text}' would replace the image", hint="give a target below /")
    return Mount(source=source, target=target, is_read_only=mode == "ro")


def variables_to_pass(names: Iterable[str]) -> list[str]:
    """Return the names of a job's variables that enter its container, in order."""
    return sorted(
        name
        for name in names
        if _NAME.fullmatch(name) and name not in _OF_HOST and not name.startswith(_OF_HOST_PREFIXES)
    )


def bare_container_tool(command: Sequence[str]) -> str | None:
    """Return the tool with which a command (not a script) starts a container outside its job's processes, or None."""
    text = " ".join(command)
    if "docker" not in text and "podman" not in text and "nerdctl" not in text:
        return None
    found = _BARE_RUN.search(text) or _COMPOSE.search(text)
    return found[1] if found else None
