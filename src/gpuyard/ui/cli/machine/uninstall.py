"""`gpuyard uninstall`: lists all files of this user's gpuyard, and removes them."""

from msgspec import to_builtins

from gpuyard.errors import UserError
from gpuyard.installation import find_installation
from gpuyard.model.option import Option
from gpuyard.model.units import format_bytes, format_count
from gpuyard.recipes.uninstall import find, find_blockers, measure, uninstall
from gpuyard.ui.cli.command_grammar import JSON, Typed, Verb
from gpuyard.ui.cli.terminal import note, say, say_json, table_lines
from gpuyard.ui.cli.text_table import make_columns

VERB = Verb(
    """List all files of your gpuyard, and remove them.

    These are the queue, logs, configuration, leases, the page's token, a systemd unit and completions. Workspaces and
    outputs stay. Nothing is removed while jobs run or wait. The last line says how to remove the package itself.
    """,
    (
        Option("dry-run", "flag", None, "Only list what would be removed.", note="default"),
        Option("yes", "flag", None, "Stop the daemon and remove what is listed."),
        JSON,
    ),
)


def run(typed: Typed) -> int:
    yes = typed.flag("yes")
    if typed.flag("dry-run") and yes:
        raise UserError("--dry-run and --yes contradict each other", hint="give one of them")
    found, remove_package = find(), find_installation().remove
    places = [(place, *measure(place)) for place in found.places if place.names]
    blockers = [] if yes else find_blockers()
    problems = uninstall() if yes else []
    if typed.flag("json"):
        listed = [
            {"path": each.shown, "what": each.what, "files": files, "bytes": size} for each, files, size in places
        ]
        answer = {"places": listed, "stays": to_builtins(found.kept), "then": remove_package, "removed": yes}
        say_json({**answer, "in_use": to_builtins(blockers), "problems": to_builtins(problems)})
        return 1 if problems else 0
    if yes:
        some = "; some files could not be removed" if problems else ""
        files, size = sum(files for _, files, _ in places), sum(size for _, _, size in places)
        say(f"removed {format_count(files, 'file')}, {format_bytes(size)}{some}")
        for each in problems:
            note(f"gpuyard: {each.path}: {each.why}")
    else:
        columns = make_columns("SIZE", "FILES", "WHERE", "WHAT", right=("SIZE", "FILES"))
        rows = [(format_bytes(size), str(files), each.shown, each.what) for each, files, size in places]
        say(*(table_lines(columns, rows) if rows else ["no files found"]))
    if found.kept:
        say("These stay:", *(f"  {each.path}: {each.why}" for each in found.kept))
    say("Files that you named yourself (output roots, sample logs, reports, exported scripts) stay as well.")
    say(*(f"first: {each.text}; {each.advice}" for each in blockers))
    if places and not yes:
        say("Nothing was removed. `gpuyard uninstall --yes` removes these files.")
    say(f"To remove the package itself: {remove_package}")
    return 1 if problems else 0
