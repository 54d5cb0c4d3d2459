"""Code that runs as another user, in a process of its own."""

import codecs
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from tests.unit.ledger import child

ANNE, BEN = 61001, 61002


def become(uid: int) -> None:
    """Change this process to another user for good, with a home of its own, which is missing. It may be unable to
    import further modules, or codecs."""
    os.environ["GPUYARD_HOME"] = f"/tmp/gpuyard-no-home-{uid}"
    for codec in ("ascii", "unicode_escape", "utf_8_sig"):
        codecs.lookup(codec)
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)


def act_as(uid: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function of a module as another user, and return its result. Raises what the function raises."""
    with child(_act, uid, function, arguments) as process:
        is_error, result = process.receive()
        process.join()
    if is_error:
        raise result
    return result


def _act(connection: Connection, uid: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    become(uid)
    try:
        connection.send((False, function(*arguments)))
    except Exception as error:  # noqa: BLE001 - passed on to the test
        connection.send((True, error))


def stay_as(connection: Connection, uid: int, function: Callable[..., Any], *arguments: Any) -> NoReturn:
    """For `tests.unit.ledger.child`: run a function as another user, send its result, and live until the test ends.

    What the function holds (locks, sockets, descriptors in its result's place) stays held: keep it in a global or a
    default argument.
    """
    become(uid)
    connection.send(function(*arguments))
    while True:
        connection.recv()
