"""The daemon and the command of another version: programs that change the version before any code reads it.

python other_version.py 0.0.1 daemon       in the background of a test, like `start_daemon`
python other_version.py 0.0.1 run          for a service manager, like `gpuyard daemon run`
python other_version.py 0.0.1 silent       a daemon that neither sends nor checks a version
python other_version.py 0.0.1 command …    `gpuyard …`
"""

import sys
from pathlib import Path

# By path, because a daemon is started in another working directory.
PROGRAM = str(Path(__file__).resolve())


def daemon_of(version: str, kind: str = "daemon") -> tuple[str, ...]:
    return (sys.executable, "-P", PROGRAM, version, kind)


def command_of(version: str, *arguments: str) -> list[str]:
    return [sys.executable, "-P", PROGRAM, version, "command", *arguments]


def _main(version: str, kind: str) -> None:
    from gpuyard import version as module

    module.__version__ = version
    if kind == "command":
        from gpuyard.ui.cli import main

        sys.argv[1:] = sys.argv[3:]
        main()
    from gpuyard.daemon.main import run_daemon
    from gpuyard.daemon.server import connection

    if kind == "silent":
        vars(connection).update(COMMON_HEADERS=(), refuse_if_too_old=lambda _: True)
    sys.exit(run_daemon(is_managed=kind == "run"))


if __name__ == "__main__":
    _main(*sys.argv[1:3])
