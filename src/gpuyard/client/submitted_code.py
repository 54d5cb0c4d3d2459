"""What a submission takes from files: whether its command is a program or a line for a shell, the Git commit and a
digest of its script, a snapshot of its code, a digest of its configuration, and the framework that its script imports.

It is fast: no `git` is called, and files that cannot be read are ignored. Other users may have put a `.git` into any
folder above. So a repository counts only if its `.git`, and what that leads to, belong to this user, root or a group of
this user; in a folder where all users can write, a group is not enough. Its files must be regular and belong to the
same, and are read without waiting, without following links, and up to a limit."""

import os
import stat

from gpuyard.errors import UserError
from gpuyard.system.submitting_shell import read_shell_settings, starting_processes
from gpuyard.system.user_directories import user_directory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

# Set for a job that runs in a snapshot.
_IN_SNAPSHOT = "GPUYARD_SNAPSHOT"
_MEGABYTE = 1 << 20


def work_tree(cwd: str) -> str | None:
    """Return the Git work tree that contains a folder; None if there is none."""
    folder = os.path.abspath(cwd)
    while git_folder(folder) is None:
        folder, below = os.path.dirname(folder), folder
        if folder == below:
            return None
    return folder


def git_folder(root: str) -> str | None:
    """Return the folder of the repository of a work tree, which a file `.git` may name; None if none counts."""
    path = f"{root}/.git"
    try:
        found = os.lstat(path)
        if not _is_ours(found, above=root):
            return None
        if stat.S_ISREG(found.st_mode):
            text = read_text(path)
            path = os.path.join(root, text.removeprefix("gitdir: ").strip()) if text.startswith("gitdir: ") else ""
        if not stat.S_ISDIR(found.st_mode):
            found = os.stat(path)
    except (OSError, ValueError):
        return None
    return path if stat.S_ISDIR(found.st_mode) and _is_ours(found) else None


def shared_folder(git: str) -> str:
    """Return the folder with branches and objects, which linked work trees share."""
    return os.path.join(git, read_text(f"{git}/commondir").strip())


def read_commit(root: str) -> str | None:
    """Return the commit that is checked out; None before the first commit, or if it cannot be told."""
    git = git_folder(root)
    if git is None:
        return None
    head = read_text(f"{git}/HEAD")
    if not head.startswith("ref: "):
        return _commit(head)
    name, shared = head[len("ref: ") :].strip(), shared_folder(git)
    if found := _commit(read_text(f"{git}/{name}")) or _commit(read_text(f"{shared}/{name}")):
        return found
    packed = read_text(f"{shared}/packed-refs", 8 << 20).splitlines()
    return next((_commit(line.partition(" ")[0]) for line in packed if line.partition(" ")[2] == name), None)


def _commit(text: str) -> str | None:
    text = text.strip()
    return text if len(text) in (40, 64) and not text.strip("0123456789abcdef") else None


def read_text(path: str, most: int = 4096) -> str:
    """Return the beginning of a file of a repository; empty if it cannot be read, or does not count."""
    return (_read_start(path, most, os.O_NOFOLLOW, is_ours=True) or b"").decode(errors="surrogateescape")


def _is_ours(found: os.stat_result, above: str | None = None) -> bool:
    """Return whether this belongs to this user, root or a group of this user; a group is not enough if all users can
    write to the folder above."""
    if found.st_uid in (os.geteuid(), 0):
        return True
    is_groups = found.st_gid == os.getegid() or found.st_gid in os.getgroups()
    return is_groups and (above is None or not os.stat(above).st_mode & stat.S_IWOTH)


def command_words(words: "Sequence[str]", directory: str | None) -> list[str]:
    """Return the arguments of the program. One argument with spaces or shell operators in it is a command line, unless
    a file or program has this name. `directory`: where the program starts; None: on a machine not seen from here."""
    is_line = len(words) == 1 and any(char in words[0] for char in " \t\n;&|<>")
    if is_line and directory is not None:
        path = [] if "/" in words[0] else filter(None, os.environ.get("PATH", "").split(os.pathsep))
        is_line = not any(os.path.exists(os.path.join(folder, words[0])) for folder in (directory, *path))
    if not is_line:
        return list(words)
    from gpuyard.model.command_line import read_line

    return list(read_line(words[0].strip()))


def record_code(command: "Sequence[str]", cwd: str, *, wants_snapshot: bool | None) -> "tuple[str, dict[str, Any]]":
    """Return the working directory, and the fields of a `CodeRecord`; with a snapshot if one is wanted. wants_snapshot:
    None: as `[submit]` says. A job that runs in a snapshot submits jobs that run in the same one."""
    if (inherited := _inherited(cwd)) is not None:
        cwd, snapshot = inherited
        code = code_of(command, cwd)
        return cwd, code if wants_snapshot is False else {**code, "snapshot": snapshot}
    code = code_of(command, cwd)
    if wants_snapshot is None:
        # Parsing the configuration takes longer than the rest of a submission.
        path = f"{user_directory('XDG_CONFIG_HOME', '~/.config')}/config.toml"
        wants_snapshot = None if b"snapshot" in (_read_start(path, _MEGABYTE) or b"") else False
    if wants_snapshot is False:
        return cwd, code
    from gpuyard.client.code_snapshot import SnapshotLimits, take_snapshot
    from gpuyard.client.paths import state_folder
    from gpuyard.config import load_config
    from gpuyard.system.code_snapshot_listing import FOLDER
    from gpuyard.system.private_files import make_folder

    config = load_config()
    if wants_snapshot is None and not config.submit.snapshot:
        return cwd, code
    named = config.submit.snapshot_folder
    folder = os.path.expanduser(named) if named else f"{state_folder()}/{FOLDER}"
    make_folder(folder, is_closed=True)
    limits = SnapshotLimits(config.submit.snapshot_size_mb, config.host.min_free_disk_mb)
    return cwd, {**code, "snapshot": take_snapshot(cwd, folder, limits)}


class RemovedIfRefused:
    """Removes the snapshot if the daemon refuses the submission in this `with` block. Otherwise it may have jobs."""

    def __init__(self, code: "dict[str, Any]") -> None:
        self._snapshot = code.get("snapshot")

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: "type[BaseException] | None", *_: object) -> None:
        folder = (self._snapshot or {}).get("folder")
        if kind is not None and issubclass(kind, UserError) and folder not in (None, os.environ.get(_IN_SNAPSHOT)):
            from gpuyard.client.code_snapshot import remove_snapshot

            remove_snapshot(os.path.dirname(folder))


def _inherited(cwd: str) -> "tuple[str, dict[str, str]] | None":
    """Return the place in the tree, and the snapshot, of a working directory in the snapshot of the job we run in."""
    folder = os.environ.get(_IN_SNAPSHOT)
    if folder is None or not (cwd == folder or cwd.startswith(f"{folder}/")):
        return None
    from gpuyard.system.code_snapshot_listing import FILES, read_listing

    above, name = os.path.split(os.path.dirname(folder))
    try:
        root, _ = read_listing(f"{above}/{name}/{FILES}")
    except OSError:
        return None
    return root + cwd.removeprefix(folder), {"name": name, "folder": folder, "root": root, "cwd": cwd}


def submission_facts(
    command: "Sequence[str]", directory: str, *, wants_snapshot: bool | None, with_own: bool = False
) -> "dict[str, Any]":
    """Return what comes from this process, its shell, and files. `with_own`: this process is a script that submits."""
    directory, code = record_code(command, directory, wants_snapshot=wants_snapshot)
    return {
        "token": os.urandom(16).hex(), "command": list(command) or None, "cwd": directory,
        "configuration": digest_of(command, directory), "framework": framework_of(command, directory),
        "environment": dict(os.environ), "shell": read_shell_settings(),
        "submitters": starting_processes(with_own=with_own), "code": code,
    }  # fmt: skip


def code_of(command: "Sequence[str]", cwd: str) -> "dict[str, object]":
    root, script = work_tree(cwd), find_script(command, cwd)
    commit = None if root is None else read_commit(root)
    digest = None if script is None else script_digest(script)
    return {"root": root, "commit": commit, "script": script, "digest": digest}


def find_script(command: "Sequence[str]", cwd: str) -> str | None:
    """Return the script as an absolute path: the first argument that is a file with the ending of a script, the module
    of `-m`, or a program given by its path that begins with `#!`. None if there is none."""
    endings = (".py", ".sh", ".bash", ".zsh", ".fish", ".r", ".jl", ".lua", ".pl", ".rb", ".js", ".ts", ".ipynb", ".m")
    for word in command:
        if word.lower().endswith(endings) and (path := _file(cwd, word)) is not None:
            return path
    if "-m" in command[:-1]:
        module = command[list(command).index("-m") + 1].replace(".", "/")
        return _file(cwd, f"{module}.py") or _file(cwd, f"{module}/__main__.py")
    program = _file(cwd, command[0]) if command and "/" in command[0] else None
    return program if program is not None and _read_start(program, 2) == b"#!" else None


def script_digest(path: str) -> str | None:
    """Return the digest of a script; a long one is known by its beginning."""
    content = _read_start(path, _MEGABYTE)
    if content is None:
        return None
    from _blake2 import blake2b  # as in `hashlib`, without the milliseconds that OpenSSL takes to load

    return str(blake2b(content, digest_size=16).hexdigest())


def _read_start(path: str, most: int, flags: int = 0, *, is_ours: bool = False) -> bytes | None:
    """Return the first bytes of a regular file; None if it cannot be read, or if it has to be `_is_ours` and is not."""
    descriptor = None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | flags)
        found = os.fstat(descriptor)
        return os.read(descriptor, most) if stat.S_ISREG(found.st_mode) and (not is_ours or _is_ours(found)) else None
    except (OSError, ValueError):
        return None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _file(cwd: str, name: str) -> str | None:
    path = os.path.normpath(os.path.join(cwd, name))
    try:
        return path if stat.S_ISREG(os.stat(path).st_mode) else None
    except (OSError, ValueError):
        return None


def digest_of(command: "Sequence[str]", cwd: str) -> str:
    """Return a digest of names and contents; empty if the command names no configuration file."""
    names = (argument.partition("=")[2] or argument for argument in command)  # x.yaml in `--config=x.yaml`
    named = [name for name in names if name.lower().endswith((".yaml", ".yml", ".json", ".toml", ".ini", ".cfg"))]
    files = [(name, content) for name in named if (content := _read_small(os.path.join(cwd, name))) is not None]
    if not files:
        return ""
    from _blake2 import blake2b  # as in `hashlib`, without the milliseconds that OpenSSL takes to load

    digest = blake2b(digest_size=16)
    for name, content in files:
        digest.update(b"%d %d\0" % (len(name), len(content)))
        digest.update(os.fsencode(name))
        digest.update(content)
    return digest.hexdigest()


def framework_of(command: "Sequence[str]", cwd: str) -> str:
    """Return the framework that the command's Python script imports; empty if none is known."""
    script = next((word for word in command if word.endswith(".py")), None)
    content = _read_small(os.path.join(cwd, script)) if script is not None else None
    if content is None:
        return ""
    # The order matters: scripts for JAX, TensorFlow or vLLM often import PyTorch as well.
    frameworks = {
        "vllm": (b"vllm",),
        "jax": (b"jax", b"flax"),
        "tensorflow": (b"tensorflow", b"keras"),
        "torch": (b"torch", b"pytorch_lightning", b"lightning", b"transformers", b"diffusers"),
        "cupy": (b"cupy",),
    }
    for framework, modules in frameworks.items():
        if any(b"import " + module in content or b"from " + module in content for module in modules):
            return framework
    return ""


def _read_small(path: str) -> bytes | None:
    """Return the content. A larger file is no configuration, and no script that tells its framework."""
    content = _read_start(path, _MEGABYTE + 1)
    return content if content is not None and len(content) <= _MEGABYTE else None
