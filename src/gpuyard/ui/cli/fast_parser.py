"""Parses the command line of a queue verb from its table, without click.

It accepts only correct command lines. It leaves all others (unknown options, missing values, `--help`) to click, which
has the error messages. A command line that both accept has the same meaning for both.
"""

from gpuyard.ui.cli.verb_options import Option, Typed, Verb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


def parse(verb: Verb, argv: list[str]) -> Typed | None:
    """Return the parsed command line, or None if click has to parse it."""
    options: dict[str, str | bool | list[str]] = {}
    positional: list[str] = []
    is_program = verb.arguments is not None and verb.arguments.is_program
    left = iter(argv)
    for argument in left:
        if argument == "--":
            positional += left
        elif _is_positional(argument, is_program=is_program):
            positional.append(argument)
            if is_program:
                positional += left
        elif not _take_option(verb, argument, left, options):
            return None
    return Typed(options, positional) if _are_accepted(verb, positional) else None


def _is_positional(argument: str, *, is_program: bool) -> bool:
    """Whether it is an argument, and not an option. `-5` is a number, except where a program is expected."""
    return argument == "-" or not argument.startswith("-") or (argument[1:].isdecimal() and not is_program)


def _take_option(verb: Verb, argument: str, left: "Iterator[str]", options: dict[str, str | bool | list[str]]) -> bool:
    name, equals, value = argument.partition("=")
    option = _find(verb, name)
    if option is None or (equals and (option.is_flag or not name.startswith("--"))):
        return False
    if option.is_flag:
        options[option.name] = True
        return True
    given = value if equals else next(left, None)
    if given is None:
        return False
    if option.is_repeatable:
        earlier = options.get(option.name)
        options[option.name] = [*earlier, given] if isinstance(earlier, list) else [given]
    else:
        options[option.name] = given
    return True


def _find(verb: Verb, name: str) -> Option | None:
    for option in verb.options:
        if name in (f"--{option.name}", f"-{option.short}"):
            return option
    return None


def _are_accepted(verb: Verb, positional: list[str]) -> bool:
    if verb.arguments is None:
        return not positional
    if verb.arguments.choices and not all(argument in verb.arguments.choices for argument in positional):
        return False
    return verb.arguments.is_many or len(positional) == 1
