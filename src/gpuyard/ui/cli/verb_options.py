"""Queue verbs as plain data (options, arguments and help), and the parser of their command lines.

`click_group` makes click commands of the same data for `--help`, completion and error messages. Neither this module
nor a verb may import what takes milliseconds (click, msgspec, rich, typing): scripts call `gpuyard submit` in loops."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    # An object of the daemon's JSON.
    Answer = dict[str, Any]
else:
    Answer = dict


class Option:
    """`--name METAVAR`, or a flag without a metavar; `short` is its one-letter form. Shells complete `choices`."""

    def __init__(  # noqa: PLR0913 - the parts of an option
        self,
        name: str,
        metavar: str | None,
        text: str,
        *,
        short: str | None = None,
        is_repeatable: bool = False,
        choices: "Sequence[str]" = (),
    ) -> None:
        self.name, self.metavar, self.text = name, metavar, text
        self.short, self.is_repeatable, self.choices = short, is_repeatable, choices

    @property
    def is_flag(self) -> bool:
        return self.metavar is None


class Arguments:
    """The positional arguments: one, one of `choices`, many, or a program with all arguments that follow; with
    `takes_program`, a program may follow them after `--`."""

    def __init__(
        self,
        metavar: str,
        *,
        choices: "Sequence[str]" = (),
        is_many: bool = False,
        is_program: bool = False,
        takes_program: bool = False,
    ) -> None:
        self.metavar, self.choices = metavar, choices
        self.is_many, self.is_program, self.takes_program = is_many or is_program, is_program, takes_program


class Verb:
    """`text` is the help; its first line is the summary. `options`: or a function that returns them, which is called if
    an option is typed, or for the help: a long table takes as long as the rest of a command. `headings`: the names of
    the options under each heading of the help, separated by spaces."""

    def __init__(
        self,
        text: str,
        options: "Sequence[Option] | Callable[[], Sequence[Option]]" = (),
        arguments: Arguments | None = None,
        headings: "dict[str, str]" = {},  # noqa: B006 - never changed
    ) -> None:
        self.text, self.arguments, self.headings = text, arguments, headings
        self._options = options

    @property
    def options(self) -> "Sequence[Option]":
        return self._options() if callable(self._options) else self._options


class Typed:
    """A parsed command line: options by name, with their values as typed, the positional arguments, and the program
    after `--` of a verb that takes one besides these."""

    def __init__(
        self, options: "dict[str, str | bool | list[str]]", arguments: list[str], program: "Sequence[str]" = ()
    ) -> None:
        self.options, self.arguments, self.program = options, arguments, list(program)

    def flag(self, name: str) -> bool:
        return self.options.get(name) is True

    def text(self, name: str) -> str | None:
        value = self.options.get(name)
        return value if isinstance(value, str) else None


JSON = Option("json", None, "Print JSON with stable keys.")
IDS = "17, 17-20, state=failed, tag=night, name=big, since=22:00 or all"
# For the help: what several of them together select.
IDS_HELP = f"IDS are {IDS}. A job has one of the ids and meets each condition: 17-40 state=failed,cancelled."
SEVERAL = Arguments("IDS...", is_many=True)
ONE = Arguments("ID")


def parse(verb: Verb, argv: list[str]) -> Typed | None:
    """Return the parsed command line, or None if click has to parse it: `--help`, and every mistake.

    A command line that both accept has the same meaning for both.
    """
    options: dict[str, str | bool | list[str]] = {}
    positional: list[str] = []
    program: list[str] = []
    is_program = verb.arguments is not None and verb.arguments.is_program
    left = iter(argv)
    for argument in left:
        if argument == "--" and verb.arguments is not None and verb.arguments.takes_program:
            program += left
        elif argument == "--":
            positional += left
        elif _is_positional(argument, is_program=is_program):
            positional.append(argument)
            if is_program:
                positional += left
        elif not _take_option(verb, argument, left, options):
            return None
    return Typed(options, positional, program) if _are_accepted(verb, positional) else None


def _is_positional(argument: str, *, is_program: bool) -> bool:
    """Whether it is an argument, and not an option. `-5` is a number, except where a program is expected."""
    return argument == "-" or not argument.startswith("-") or (argument[1:].isdecimal() and not is_program)


def _take_option(verb: Verb, argument: str, left: "Iterator[str]", options: dict[str, str | bool | list[str]]) -> bool:
    name, equals, value = argument.partition("=")
    option = next((each for each in verb.options if name in (f"--{each.name}", f"-{each.short}")), None)
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


def _are_accepted(verb: Verb, positional: list[str]) -> bool:
    if verb.arguments is None:
        return not positional
    if verb.arguments.choices and not all(argument in verb.arguments.choices for argument in positional):
        return False
    return verb.arguments.is_many or len(positional) == 1
