"""What the files say that a command names: a digest of its configuration, so that each configuration gets its own
estimates, and the framework that its script imports, whose other programs say what to expect of it.

Only regular files up to 1 MB count. Files that cannot be read are ignored: the job itself will report them. A command
that names no such file imports nothing.
"""

import os
import stat

_ENDINGS = (".yaml", ".yml", ".json", ".toml", ".ini", ".cfg")
_MOST_BYTES = 1 << 20
# The order matters: scripts for JAX, TensorFlow or vLLM often import PyTorch as well.
_FRAMEWORKS = {
    "vllm": (b"vllm",),
    "jax": (b"jax", b"flax"),
    "tensorflow": (b"tensorflow", b"keras"),
    "torch": (b"torch", b"pytorch_lightning", b"lightning", b"transformers", b"diffusers"),
    "cupy": (b"cupy",),
}


def digest_of(command: list[str], cwd: str) -> str:
    """Return a digest of names and contents; empty if the command names no configuration file."""
    names = (argument.partition("=")[2] or argument for argument in command)  # x.yaml in `--config=x.yaml`
    named = [name for name in names if name.lower().endswith(_ENDINGS)]
    files = [(name, content) for name in named if (content := _read(os.path.join(cwd, name))) is not None]
    if not files:
        return ""
    from _blake2 import blake2b  # as in `hashlib`, without the milliseconds that OpenSSL takes to load

    digest = blake2b(digest_size=16)
    for name, content in files:
        digest.update(b"%d %d\0" % (len(name), len(content)))
        digest.update(os.fsencode(name))
        digest.update(content)
    return digest.hexdigest()


def framework_of(command: list[str], cwd: str) -> str:
    """Return the framework that the command's Python script imports; empty if none is known."""
    script = next((word for word in command if word.endswith(".py")), None)
    content = _read(os.path.join(cwd, script)) if script is not None else None
    if content is None:
        return ""
    for framework, modules in _FRAMEWORKS.items():
        if any(b"import " + module in content or b"from " + module in content for module in modules):
            return framework
    return ""


def _read(path: str) -> bytes | None:
    try:
        # A named pipe with such a name would block.
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
            return None
        with open(path, "rb") as file:
            return file.read(_MOST_BYTES)
    except (OSError, ValueError):
        return None
