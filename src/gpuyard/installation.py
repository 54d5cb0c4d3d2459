"""Find out how this gpuyard was installed, and the commands that upgrade it, extend it and remove it.

Installers leave traces: pipx and uv a file in the environment's directory, all of them the package's metadata, which
names the source directory unless the package came from an index."""

import json
import os
import re
import shlex
import sys
from importlib import metadata
from urllib.parse import unquote, urlsplit

from msgspec import Struct

_PACKAGE = "gpuyard"


class Installation(Struct, frozen=True):
    """How gpuyard is installed in the environment `folder`. `upgrade`, `remove` and `install` are shell commands.
    `source` is the package name, or the directory or file that it was installed from. `kept` are the extras that a new
    installation would drop unless it names them."""

    folder: str
    upgrade: str
    remove: str
    install: str
    source: str
    kept: tuple[str, ...] = ()

    def with_extra(self, extra: str) -> str:
        """Return the command that installs an extra, such as `render`, and keeps the installed extras."""
        extras = ",".join(sorted({extra, *self.kept}))
        return f"{self.install} {shlex.quote(f'{self.source}[{extras}]')}"


def find_installation(folder: str = sys.prefix, python: str = sys.executable) -> Installation:
    """Return how the gpuyard in this environment was installed."""
    try:
        installed = metadata.distribution(_PACKAGE)
    except metadata.PackageNotFoundError:  # for example imported through PYTHONPATH
        here = shlex.quote(os.path.dirname(os.path.abspath(__file__)))
        commands = (f"put the newer version into {here}", f"rm -r {here}", f"{shlex.quote(python)} -m pip install")
        return Installation(folder, *commands, source=_PACKAGE)
    source, is_editable = _source(installed)
    kept: tuple[str, ...] = ()
    if os.path.exists(os.path.join(folder, "pipx_metadata.json")):
        name = shlex.quote(os.path.basename(folder))
        commands = (f"pipx upgrade {name}", f"pipx uninstall {name}", "pipx install --force")
        kept = _extras(installed)
    elif os.path.exists(os.path.join(folder, "uv-receipt.toml")):
        commands = (f"uv tool upgrade {_PACKAGE}", f"uv tool uninstall {_PACKAGE}", "uv tool install --force")
        kept = _extras(installed)
    elif is_editable and os.path.dirname(folder) == source:
        checkout = shlex.quote(source)
        pip = f"{shlex.quote(python)} -m pip install --editable"
        commands = (f"git -C {checkout} pull && make -C {checkout} install", f"make -C {checkout} clean", pip)
    else:
        own = shlex.quote(python)
        is_uv = (installed.read_text("INSTALLER") or "").strip() == "uv"
        pip, options = ("uv pip", f" --python {own}") if is_uv else (f"{own} -m pip", "")
        install = f"{pip} install{options}{' --editable' if is_editable else ''}"
        commands = (f"{install} --upgrade {shlex.quote(source)}", f"{pip} uninstall{options} {_PACKAGE}", install)
    return Installation(folder, *commands, source=source, kept=kept)


def _extras(installed: metadata.Distribution) -> tuple[str, ...]:
    """Return the extras with all their packages installed."""
    requirements: dict[str, list[str]] = {}
    for text in installed.requires or ():  # such as: textual>=1.0; extra == 'top'
        if match := re.match(r"""([\w.-]+).*;.*\bextra == ['"]([\w-]+)['"]""", text):
            requirements.setdefault(match[2], []).append(match[1])
    return tuple(extra for extra, names in requirements.items() if all(map(_is_installed, names)))


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _source(installed: metadata.Distribution) -> tuple[str, bool]:
    """Return what the package was installed from, and whether it is an editable checkout."""
    try:
        origin = json.loads(installed.read_text("direct_url.json") or "null")
        url, about = urlsplit(origin["url"]), origin.get("dir_info", {})
    except (ValueError, LookupError, TypeError):
        return _PACKAGE, False
    if url.scheme != "file":
        return _PACKAGE, False
    return unquote(url.path), bool(about.get("editable"))
