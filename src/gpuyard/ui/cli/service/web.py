"""`gpuyard web`: opens the queue's web page, and prints its address."""

import os

from gpuyard.client.fast_http import NoDaemon, connect
from gpuyard.model.option import Option
from gpuyard.ui.cli.ask_daemon import request, say_answer
from gpuyard.ui.cli.command_grammar import JSON, Typed, Verb
from gpuyard.ui.cli.terminal import note

VERB = Verb(
    """Open the queue's web page, and print its address.

    The daemon serves it on this machine only, to browsers that have the token: open the whole address. Called again,
    it prints the same address. `web = true` in config.toml opens the page whenever the daemon starts.
    """,
    (
        Option("address", "text", "ADDRESS",
               "Listen on this address, unencrypted, so that other machines can reach it.", note="127.0.0.1"),
        Option("port", "whole", "PORT", "Listen on this port; 0 for any free one.", least=0, most=65535,
               note="8765, or the next free one"),
        Option("read-only", "flag", None, "Read-only: the page cannot change or submit jobs."),
        Option("new-token", "flag", None, "Make a new token; the old one stops working."),
        Option("stop", "flag", None, "Close the page."),
        JSON,
    ),
)  # fmt: skip


def run(typed: Typed) -> int:
    if typed.flag("stop"):
        return _stop(typed)
    options = {
        "address": typed.text("address"),
        "port": typed.values()["port"],
        "read_only": typed.flag("read-only") or None,
        "new_token": typed.flag("new-token") or None,
    }
    body = {name: value for name, value in options.items() if value is not None}
    answer = request("POST", "/web", body=body, is_repeatable=not typed.flag("new-token"))
    say_answer(typed, answer, answer["url"])
    if not typed.flag("json"):
        for text in answer["notes"]:
            note(f"! {text}")
        if answer["read_only"]:
            note("read-only")
        if (address := answer["address"]) == "127.0.0.1":
            tunnel = f"ssh -L {answer['port']}:{address}:{answer['port']} {os.uname().nodename}"
            note(f"from another machine: {tunnel}, then open the same address")
    return 0


def _stop(typed: Typed) -> int:
    try:
        with connect(start=False) as daemon:
            was_open = daemon.request("POST", "/web/stop", body={})["stopped"]
    except NoDaemon:
        was_open = False
    return say_answer(typed, {"stopped": was_open}, "the page is closed" if was_open else "no page is open")
