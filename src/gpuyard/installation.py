"""Where this gpuyard is installed, and the command lines that upgrade it, extend it and remove it.

It is recognised by what installers leave behind: pipx and uv a file in the environment's folder, all of them the
package's metadata, with the folder that it was installed from where that was no package index.
"""

import json
import os
import re
import shlex
import sys
from importlib import metadata
from urllib.parse import unquote, urlsplit

from msgspec import Struct

_PACKAGE = "gpuyard"
# As metadata has it: textual>=1.0; extra == 'top'
_OF_EXTRA = re.compile(r"""([\w.-]+).*;.*\bextra == ['"]([\w-]+)['"]""")


class Installation(Struct, frozen=True, kw_only=True):
    """`folder` is the environment's; `upgrade`, `remove` and `install` are lines for a shell. `source` is what is
    installed: the name of the package, or the folder or file that it came from. `kept` are extras that another
    installation would drop unless they are named again."""

    folder: str
    upgrade: str
    remove: str
    source: str
    install: str
    kept: tuple[str, ...] = ()

    def with_extra(self, extra: str) -> str:
        """Return the line that installs one of the package's extras, such as `render`, beside what is there."""
        extras = ",".join(sorted({extra, *self.kept}))
        return f"{self.install} {shlex.quote(f'{self.source}[{extras}]')}"


def find_installation(folder: str = sys.prefix, python: str = sys.executable) -> Installation:
    """Return how the gpuyard in this environment was installed."""
    try:
        installed = metadata.distribution(_PACKAGE)
    except metadata.PackageNotFoundError:  # found by PYTHONPATH, say
        return _copied(folder, shlex.quote(python))
    source, is_editable = _source(installed)
    kept: tuple[str, ...] = ()
    if os.path.exists(os.path.join(folder, "pipx_metadata.json")):
        name = shlex.quote(os.path.basename(folder))
        lines = (f"pipx upgrade {name}", f"pipx uninstall {name}", "pipx install --force")
        kept = _extras(installed)
    elif os.path.exists(os.path.join(folder, "uv-receipt.toml")):
        lines = (f"uv tool upgrade {_PACKAGE}", f"uv tool uninstall {_PACKAGE}", "uv tool install --force")
        kept = _extras(installed)
    elif is_editable and os.path.dirname(folder) == source:
        place = shlex.quote(source)
        pip = f"{shlex.quote(python)} -m pip install --editable"
        lines = (f"git -C {place} pull && make -C {place} install", f"make -C {place} clean", pip)
    else:
        lines = _in_environment(installed, shlex.quote(python), source, is_editable=is_editable)
    upgrade, remove, install = lines
    return Installation(folder=folder, upgrade=upgrade, remove=remove, source=source, install=install, kept=kept)


def _in_environment(
    installed: metadata.Distribution, python: str, source: str, *, is_editable: bool
) -> tuple[str, str, str]:
    is_uv = (installed.read_text("INSTALLER") or "").strip() == "uv"
    install = f"uv pip install --python {python}" if is_uv else f"{python} -m pip install"
    remove = f"uv pip uninstall --python {python}" if is_uv else f"{python} -m pip uninstall"
    if is_editable:
        install += " --editable"
    return f"{install} --upgrade {shlex.quote(source)}", f"{remove} {_PACKAGE}", install


def _copied(folder: str, python: str) -> Installation:
    here = shlex.quote(os.path.dirname(os.path.abspath(__file__)))
    return Installation(
        folder=folder,
        upgrade=f"put the newer version into {here}",
        remove=f"rm -r {here}",
        source=_PACKAGE,
        install=f"{python} -m pip install",
    )


def _extras(installed: metadata.Distribution) -> tuple[str, ...]:
    """Return the extras whose packages are all there."""
    wanted: dict[str, list[str]] = {}
    for text in installed.requires or ():
        match = _OF_EXTRA.match(text)
        if match is not None:
            wanted.setdefault(match[2], []).append(match[1])
    return tuple(extra for extra, names in wanted.items() if all(map(_is_there, names)))


def _is_there(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _source(installed: metadata.Distribution) -> tuple[str, bool]:
    """Return what it was installed from, and whether as an editable checkout."""
    try:
        told = json.loads(installed.read_text("direct_url.json") or "null")
        url, about = urlsplit(told["url"]), told.get("dir_info", {})
    except (ValueError, LookupError, TypeError):
        return _PACKAGE, False
    if url.scheme != "file":
        return _PACKAGE, False
    return unquote(url.path), bool(about.get("editable"))
