"""`gpuyard uninstall`: lists all files of this user's gpuyard, and removes them."""

from typing import TYPE_CHECKING, Any

import click

from gpuyard.core.units import format_bytes, format_count
from gpuyard.errors import UserError
from gpuyard.ui.cli.terminal import note, say, say_json, say_table
from gpuyard.ui.cli.text_table import Column

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuyard.recipes.uninstall.find_files import FoundFiles, InstalledFiles
    from gpuyard.recipes.uninstall.remove_files import RemovalProblem, Size

_NAMED_BY_USER = "Files that you named yourself (output roots, sample logs, reports, exported scripts) stay as well."


@click.command("uninstall")
@click.option("--dry-run", is_flag=True, help="Only list what would be removed. [default]")
@click.option("--yes", is_flag=True, help="Stop the daemon and remove what is listed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON with stable keys.")
@click.pass_context
def command(context: click.Context, *, dry_run: bool, yes: bool, as_json: bool) -> None:
    """List all files of your gpuyard, and remove them.

    These are the queue, logs, configuration, leases, the page's token, a systemd unit and completions. Workspaces and
    outputs stay. Nothing is removed while jobs run or wait. The last line says how to remove the package itself.
    """
    if dry_run and yes:
        raise UserError("--dry-run and --yes contradict each other", hint="give one of them")
    from gpuyard.recipes.uninstall.find_files import find
    from gpuyard.recipes.uninstall.remove_files import measure

    found = find()
    sizes = [(place, measure(place)) for place in found.places if place.names]
    if yes:
        context.exit(_remove(found, sizes, as_json=as_json))
    _list(found, sizes, as_json=as_json)


def _list(found: "FoundFiles", sizes: "Sequence[tuple[InstalledFiles, Size]]", *, as_json: bool) -> None:
    from gpuyard.recipes.uninstall.uninstall import find_blockers

    in_use = find_blockers()
    if as_json:
        problems = [{"text": each.text, "advice": each.advice} for each in in_use]
        say_json({**_as_json(found, sizes), "removed": False, "in_use": problems, "problems": []})
        return
    if sizes:
        _say_places(sizes)
    else:
        say("no files found")
    _say_stays(found)
    for each in in_use:
        say(f"first: {each.text}; {each.advice}")
    if sizes:
        say("Nothing was removed. `gpuyard uninstall --yes` removes these files.")
    say(f"To remove the package itself: {_last_line()}")


def _remove(found: "FoundFiles", sizes: "Sequence[tuple[InstalledFiles, Size]]", *, as_json: bool) -> int:
    from gpuyard.recipes.uninstall.uninstall import uninstall

    last = _last_line()
    problems = uninstall()
    if as_json:
        left = [{"path": each.path, "why": each.why} for each in problems]
        say_json({**_as_json(found, sizes), "removed": True, "in_use": [], "problems": left})
    else:
        _say_removed(found, sizes, problems, last)
    return 1 if problems else 0


def _say_removed(
    found: "FoundFiles", sizes: "Sequence[tuple[InstalledFiles, Size]]", problems: "Sequence[RemovalProblem]", last: str
) -> None:
    files, size = sum(size.files for _, size in sizes), sum(size.bytes for _, size in sizes)
    some = "; some files could not be removed" if problems else ""
    say(f"removed {format_count(files, 'file')}, {format_bytes(size)}{some}")
    for each in problems:
        note(f"gpuyard: {each.path}: {each.why}")
    _say_stays(found)
    say(f"To remove the package itself: {last}")


def _say_places(sizes: "Sequence[tuple[InstalledFiles, Size]]") -> None:
    columns = (Column("SIZE", is_right=True), Column("FILES", is_right=True), Column("WHERE"), Column("WHAT"))
    say_table(columns, [(format_bytes(size.bytes), str(size.files), place.shown, place.what) for place, size in sizes])


def _say_stays(found: "FoundFiles") -> None:
    say("These stay:" if found.kept else _NAMED_BY_USER)
    for each in found.kept:
        say(f"  {each.path}: {each.why}")
    if found.kept:
        say(_NAMED_BY_USER)


def _as_json(found: "FoundFiles", sizes: "Sequence[tuple[InstalledFiles, Size]]") -> dict[str, Any]:
    return {
        "places": [
            {"path": place.shown, "what": place.what, "files": size.files, "bytes": size.bytes} for place, size in sizes
        ],
        "stays": [{"path": each.path, "why": each.why} for each in found.kept],
        "then": _last_line(),
    }


def _last_line() -> str:
    from gpuyard.installation import find_installation

    return find_installation().remove
