"""`gpuyard backup`, `restore` and `clean`: a copy of the queue's history, estimates and waiting jobs, its return, and
what is deleted."""

from gpuyard.client.fast_http import NoDaemon, connect
from gpuyard.errors import StoreFault, UserError
from gpuyard.model.option import Option
from gpuyard.model.units import format_bytes, format_count, parse_duration
from gpuyard.ui.cli.ask_daemon import request, say_answer
from gpuyard.ui.cli.command_grammar import JSON, Answer, Arguments, Command, Typed, Verb


def _run_backup(typed: Typed) -> int:
    from pathlib import Path

    from msgspec import to_builtins

    from gpuyard.client.paths import state_folder
    from gpuyard.store.backup import back_up

    try:  # a running daemon writes down what it has learned last
        with connect(start=False, on_notice=lambda _: None) as daemon:
            daemon.request("GET", "/estimates", {"limit": "0"})
    except NoDaemon:
        pass
    target = Path(typed.arguments[0]).expanduser().absolute()
    found = back_up(Path(state_folder()) / "queue.db", target, overwrite=typed.flag("force"))
    answer = {"file": str(target), **to_builtins(found)}
    return say_answer(typed, answer, f"wrote {target}: {_describe(answer)}")


def _describe(content: Answer) -> str:
    counted = [format_count(content[kind], f"{kind} job") for kind in ("finished", "unfinished")]
    return ", ".join([*counted, format_count(content["estimates"], "estimate"), format_bytes(content["bytes"])])


def _run_restore(typed: Typed) -> int:
    import contextlib
    from pathlib import Path

    from msgspec import to_builtins

    from gpuyard.client.daemon_liveness import hold_daemon_lock
    from gpuyard.client.paths import lock_path, state_folder
    from gpuyard.engines.local.keeper_connection import begun_attempts
    from gpuyard.engines.open_cluster_engine import log_folders
    from gpuyard.model.selection import format_ids
    from gpuyard.store.backup import checked_backup, count_unfinished, restore
    from gpuyard.system.private_files import make_folder

    source, folder = Path(typed.arguments[0]).expanduser().absolute(), Path(state_folder())

    def refuse_unfinished() -> None:
        unfinished: dict[str, int] = {}
        with contextlib.suppress(StoreFault):  # it is set aside
            unfinished = count_unfinished(folder / "queue.db")
        if unfinished and not typed.flag("force"):
            states = ", ".join(f"{count} {state}" for state, count in unfinished.items())
            kept = "the current queue is then kept in a file beside the new one"
            hint = f"wait for them or cancel them; or add --force: {kept}"
            raise UserError(f"the queue has jobs that have not finished: {states}", hint=hint)

    refuse_unfinished()
    logs = log_folders(folder)
    make_folder(str(folder))
    damaged: list[str] = []
    with checked_backup(source, folder, damaged.append) as draft:
        _stop_daemon()
        try:
            with hold_daemon_lock(lock_path()):
                refuse_unfinished()  # jobs may have been submitted since
                done = restore(draft, folder / "queue.db", begun_attempts(folder / "journal", logs))
        finally:
            request("GET", "/status")  # starts the daemon
    answer = {**to_builtins(done), "damaged": damaged}
    lines = [f"restored {source}: {_describe(answer['content'])}"]
    if answer["content"]["unfinished"]:
        how = "`gpuyard queue --state held` lists them, `gpuyard release` runs them"
        lines.append(f"the unfinished jobs are held: {how}")
    if answer["begun"]:
        begun = format_ids(answer["begun"])
        lines.append(f"! jobs that have started since the backup: {begun}; `gpuyard show` says more")
    lines += [f"! {note}" for note in damaged]
    if answer["aside"]:
        lines.append(f"the previous queue is in {answer['aside']}")
    return say_answer(typed, answer, *lines)


def _stop_daemon() -> None:
    from gpuyard.client.daemon_liveness import await_end
    from gpuyard.client.paths import lock_path

    try:
        with connect(start=False, on_notice=lambda _: None) as daemon:
            status = daemon.request("GET", "/status")
            if status["managed"]:
                raise UserError(
                    "a service manager or a terminal runs the daemon, and may start it again at any moment",
                    hint="stop it there (`systemctl --user stop gpuyard`), and start it there after the restore",
                )
            daemon.request("POST", "/stop", body={"reason": "`gpuyard restore`"})
    except NoDaemon:
        return
    await_end(lock_path(), status["pid"])


def _run_clean(typed: Typed) -> int:
    age = typed.text("older-than")
    answer = request("POST", "/clean", body={} if age is None else {"older_than_s": parse_duration(age)})
    jobs, logs = format_count(answer["jobs"], "job"), format_count(answer["logs"], "log")
    return say_answer(typed, answer, f"deleted {jobs} and {logs} ({format_bytes(answer['bytes'])})")


COMMANDS = {
    "backup": Command(
        Verb(
            """Write a backup of the queue to FILE, also while it runs.

            It holds all jobs with their history, the learned estimates, and waiting jobs; no logs, and no values of
            secret variables. Only you can read it.
            """,
            (Option("force", "flag", None, "Replace FILE if it exists."), JSON),
            Arguments("FILE"),
        ),
        _run_backup,
    ),
    "restore": Command(
        Verb(
            """Replace the queue by a backup.

            Jobs that had not finished when the backup was made come back as held, because they may have run since:
            `gpuyard release` runs them. The queue before is kept in a file beside it. Refused while jobs run or wait.
            """,
            (
                Option("force", "flag", None,
                       "Replace a queue with unfinished jobs; running programs go on without it."),
                JSON,
            ),
            Arguments("FILE"),
        ),
        _run_restore,
    ),
    "clean": Command(
        Verb(
            """Delete old finished jobs, and logs beyond the limits of [keep] in config.toml.

            The daemon does so by itself once an hour. A job that another job depends on is kept as long as the other
            job.

            \b
            gpuyard clean                    what [keep] says: jobs after 90 days, logs beyond 20 GB
            gpuyard clean --older-than 30d   jobs after 30 days, in place of [keep] jobs
            """,
            (
                Option("older-than", "text", "TIME", "Jobs that ended longer ago than this, such as 30d or 12h.",
                       note="`jobs` of [keep]"),
                JSON,
            ),
        ),
        _run_clean,
    ),
}  # fmt: skip
