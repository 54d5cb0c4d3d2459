"""`gpuyard web`: opens the queue's page, and prints where it is."""

from gpuyard.connect.fast_http import NoDaemon, connect
from gpuyard.errors import UserError
from gpuyard.ui.cli.terminal import note, say, say_json
from gpuyard.ui.cli.verb_options import JSON, Option, Typed, Verb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VERB = Verb(
    """Open the queue's page, and print where it is.

    The daemon serves it, on this machine alone, to whoever has the token in the address: open the whole of it. Asked
    again, it prints the same. `web = true` in config.toml opens it whenever the daemon starts.
    """,
    (
        Option("address", "ADDRESS", "Serve it there, for other machines to reach, unencrypted  [127.0.0.1]"),
        Option("port", "PORT", "Serve it on that port, 0 for any  [8765, or the next that is free]"),
        Option("read-only", None, "For looking only: nothing can be changed or submitted."),
        Option("new-token", None, "Make a new token; whoever has the old one is locked out."),
        Option("stop", None, "Serve it no longer."),
        JSON,
    ),
)


def run(typed: Typed) -> int:
    if typed.flag("stop"):
        return _stop(typed)
    with connect(start=True) as daemon:
        told = daemon.request("POST", "/web", body=_asked(typed), is_repeatable=not typed.flag("new-token"))
    if typed.flag("json"):
        say_json(told)
    else:
        _tell(told)
    return 0


def _asked(typed: Typed) -> "dict[str, Any]":
    asked: dict[str, Any] = {}
    if typed.text("address") is not None:
        asked["address"] = typed.text("address")
    if typed.text("port") is not None:
        asked["port"] = _read_port(str(typed.text("port")))
    if typed.flag("read-only"):
        asked["read_only"] = True
    if typed.flag("new-token"):
        asked["new_token"] = True
    return asked


def _read_port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) <= 65535):
        raise UserError(f"'{text}' is no port", hint="a number up to 65535, or 0 for any that is free")
    return int(text)


def _stop(typed: Typed) -> int:
    try:
        with connect(start=False) as daemon:
            was_open = daemon.request("POST", "/web/stop", body={})["stopped"]
    except NoDaemon:
        was_open = False
    if typed.flag("json"):
        say_json({"stopped": was_open})
    else:
        say("the page is closed" if was_open else "no page is open")
    return 0


def _tell(told: "dict[str, Any]") -> None:
    say(told["url"])
    for text in told["notes"]:
        note(f"! {text}")
    if told["read_only"]:
        note("for looking only")
    if told["address"] == "127.0.0.1":
        import os

        port = told["port"]
        note(f"from another machine: ssh -L {port}:127.0.0.1:{port} {os.uname().nodename}, and open the same address")
