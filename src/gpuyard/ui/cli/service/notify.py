"""`gpuyard notify`: sends a test notification."""

from gpuyard.errors import UserError
from gpuyard.ui.cli.ask_daemon import say_answer
from gpuyard.ui.cli.command_grammar import JSON, Arguments, Typed, Verb

VERB = Verb(
    """Send a test notification, and print for each target whether it was delivered.

    It goes to the targets under [notify] in the configuration, or to TARGET: a command, or a URL of a service that
    Apprise supports. Exit status 1 if a target did not get it.

    \b
    gpuyard notify test
    gpuyard notify test ntfy://my-topic
    gpuyard notify test 'notify-send "$GPUYARD_TITLE" "$GPUYARD_BODY"'
    """,
    (JSON,),
    Arguments("test [TARGET]", is_many=True),
)


def run(typed: Typed) -> int:
    verb, *named = typed.arguments or [""]
    if verb != "test" or len(named) > 1:
        raise UserError(
            "`gpuyard notify` has one command: test", hint="write gpuyard notify test, or gpuyard notify test 'TARGET'"
        )
    import socket

    from gpuyard.config import config_dir, load_config
    from gpuyard.daemon.notify.delivery import send
    from gpuyard.daemon.notify.messages import Message, at_host
    from gpuyard.model.subscriptions import check_target, redacted_target

    targets = [check_target(target) for target in named] or list(load_config().notify.to)
    if not targets:
        path = config_dir() / "config.toml"
        raise UserError("no notification target is configured", hint=f"set to = [...] under [notify] in {path}")
    title = f"A test{at_host(socket.gethostname())}"
    message = Message(events="test", title=title, body="gpuyard can notify you about the queue.")
    results = [{"target": redacted_target(target), "problem": send(target, message)} for target in targets]
    say_answer(typed, {"sent": results}, *(f"{each['target']}: {each['problem'] or 'sent'}" for each in results))
    return 1 if any(each["problem"] for each in results) else 0
