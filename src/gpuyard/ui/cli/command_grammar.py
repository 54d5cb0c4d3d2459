"""Verbs as plain data (options, arguments and help), and the one parser of all command lines.

The help and the completion are made from the same data. Neither this module nor a verb of the queue may import what
takes milliseconds (msgspec, rich, typing): scripts call `gpuyard submit` in loops.
"""

from gpuyard.errors import UserError
from gpuyard.model.option import Option

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

    from gpuyard.model.option_values import Options

    # An object of the daemon's JSON.
    Answer = dict[str, Any]
else:
    Answer = dict


class Arguments:
    """The positional arguments: `most` of them, or from `least` to `most`; with `is_many` any number from `least` on.
    Each is one of `choices` if there are any. `is_program`: a program with all arguments that follow. `takes_program`:
    a program may follow them after `--`. `is_data`: what is not exactly an option is an argument, also if it starts
    with a dash."""

    def __init__(  # noqa: PLR0913 - the parts of a grammar
        self,
        metavar: str,
        *,
        least: int | None = None,
        most: int = 1,
        choices: "Sequence[str]" = (),
        is_many: bool = False,
        is_program: bool = False,
        takes_program: bool = False,
        is_data: bool = False,
    ) -> None:
        self.metavar, self.choices = metavar, choices
        self.is_program, self.takes_program, self.is_data = is_program, takes_program, is_data
        is_many = is_many or is_program
        self.most = float("inf") if is_many else most
        self.least = least if least is not None else 0 if is_many else most


class Verb:
    """`text` is the help; its first line is the summary. `options`: or a function that returns them, which is called if
    an option is typed, or for the help: a long table takes as long as the rest of a command. `commands`: verbs below
    this one, by name. `has_headings`: the help has the options under their headings. `write_help` replaces the help
    that is made from the table."""

    def __init__(  # noqa: PLR0913 - the parts of a verb
        self,
        text: str,
        options: "Sequence[Option] | Callable[[], Sequence[Option]]" = (),
        arguments: Arguments | None = None,
        *,
        commands: "Mapping[str, Command]" = {},  # noqa: B006 - never changed
        has_headings: bool = False,
        write_help: "Callable[[Typed], str] | None" = None,
    ) -> None:
        self.text, self.arguments, self.commands = text, arguments, commands
        self.has_headings, self.write_help = has_headings, write_help
        self._options = options

    @property
    def options(self) -> "Sequence[Option]":
        return self._options() if callable(self._options) else self._options


class Command:
    """A verb and what runs it. The module of a verb has the same two names."""

    def __init__(self, verb: Verb, run: "Callable[[Typed], int]") -> None:
        self.VERB, self.run = verb, run


class Typed:
    """A parsed command line: options by name, with their values as typed, the positional arguments, and the program
    after `--` of a verb that takes one besides these. `verbs`: the verb, after those above it."""

    def __init__(
        self,
        options: "dict[str, str | bool | list[str]]",
        arguments: list[str],
        program: "Sequence[str]" = (),
        verbs: "tuple[Verb, ...]" = (),
    ) -> None:
        self.options, self.arguments, self.program, self.verbs = options, arguments, list(program), verbs

    def flag(self, name: str) -> bool:
        return self.options.get(name) is True

    def text(self, name: str) -> str | None:
        value = self.options.get(name)
        return value if isinstance(value, str) else None

    def texts(self, name: str) -> list[str]:
        value = self.options.get(name)
        return value if isinstance(value, list) else []

    def values(self) -> "Options":
        """Return the values as the kinds of the options say, with the defaults. UserError names an invalid one."""
        from gpuyard.model.option_values import Options

        return Options(self.options, {option.name: option for verb in self.verbs for option in verb.options})


JSON = Option("json", "flag", None, "Print JSON with stable keys.")
DEADLINE = Option("deadline", "time", "TIME", "Time limit for the probes.", default="2s", least=0.1)
HELP = Option("help", "flag", None, "Show this message and exit.", short="h")
IDS = "17, 17-20, state=failed, tag=night, name=big, since=22:00 or all"
# For the help: what several of them together select.
IDS_HELP = f"IDS are {IDS}. A job has one of the ids and meets each condition: 17-40 state=failed,cancelled."
SEVERAL = Arguments("IDS...", is_many=True)


def run_verb(
    name: str,
    command: Command,
    argv: "Sequence[str]",
    say_help: "Callable[[str, Verb, Typed], int] | None" = None,
    outer: Typed | None = None,
) -> int:
    """Parse the command line of a verb, run it or a command below it, or print the help. `outer` is what was typed
    before the name of a command below a verb: its options are options of the command too."""
    verb = command.VERB
    typed = parse(name, verb, argv)
    if outer is not None:
        typed = Typed({**outer.options, **typed.options}, typed.arguments, typed.program, (*outer.verbs, verb))
    below = verb.commands.get(typed.arguments[0]) if typed.arguments else None
    if below is not None:
        return run_verb(f"{name} {typed.arguments[0]}", below, typed.arguments[1:], say_help, typed)
    if say_help is not None and typed.flag("help"):
        return say_help(name, verb, typed)
    _check_arguments(name, verb, typed.arguments)
    return command.run(typed)


def parse(name: str, verb: Verb, argv: "Sequence[str]") -> Typed:
    typed = Typed({}, [], (), (verb,))
    arguments = verb.arguments or Arguments("", most=0)
    left = iter(argv)
    for argument in left:
        if argument == "--":
            (typed.program if arguments.takes_program else typed.arguments).extend(left)
        elif _is_positional(argument, arguments, verb):
            typed.arguments.append(argument)
            if arguments.is_program or argument in verb.commands:
                typed.arguments += left
        else:
            _take(name, verb, argument, left, typed.options)
    return typed


def _is_positional(argument: str, arguments: Arguments, verb: Verb) -> bool:
    """Whether it is an argument, and not an option. `-5` is a number, except where a program is expected."""
    if argument == "-" or not argument.startswith("-"):
        return True
    if arguments.is_data:
        return not any(argument in (f"--{each.name}", f"-{each.short}") for each in (*verb.options, HELP))
    return argument[1:].isdecimal() and not arguments.is_program


def _take(
    name: str, verb: Verb, argument: str, left: "Iterator[str]", options: "dict[str, str | bool | list[str]]"
) -> None:
    """Take `--name value`, `--name=value`, `-f`, `-n 5`, `-n5`, or several in one, such as `-fn5`."""
    is_long = argument.startswith("--")
    word, equals, rest = argument.partition("=") if is_long else (argument[:2], "", argument[2:])
    known = (*verb.options, HELP)
    option = next((each for each in known if (each.name == word[2:] if is_long else each.short == word[1:])), None)
    if option is None:
        raise unknown_option(name, verb, word)
    if not option.is_flag:
        value = rest if equals or rest else next(left, None)
        if value is None:
            raise UserError(f"{word} takes a value", hint=f"write it as {word} {option.metavar}: {option.help}")
        earlier = options.get(option.name)
        several = [*earlier, value] if isinstance(earlier, list) else [value]
        options[option.name] = several if option.is_repeatable else value
        return
    if equals:
        raise UserError(f"{word} takes no value", hint=f"write it as {word}")
    options[option.name] = True
    if rest:
        _take(name, verb, f"-{rest}", left, options)


def _check_arguments(name: str, verb: Verb, typed: list[str]) -> None:
    arguments = verb.arguments
    most = 0 if arguments is None else arguments.most
    hint = f"see `gpuyard {name} --help`"
    if len(typed) > most:
        extra = typed[int(most)]
        if verb.commands and not most:
            raise unknown_word(f"`gpuyard {name}` has no command '{extra}'", extra, [*verb.commands])
        raise UserError(f"unexpected extra argument '{extra}' of `gpuyard {name}`", hint=hint)
    if arguments is None:
        return
    if len(typed) < arguments.least:
        raise UserError(f"`gpuyard {name}` needs {arguments.metavar}", hint=hint)
    for word in typed if arguments.choices else ():
        if word not in arguments.choices:
            known = ", ".join(arguments.choices)
            raise UserError(f"`gpuyard {name}` cannot be followed by '{word}'", hint=f"it can be {known}")


def unknown_option(name: str, verb: Verb, word: str) -> UserError:
    known = [f"--{each.name}" for each in (*verb.options, HELP) if not each.is_hidden]
    return unknown_word(f"`gpuyard {name}` has no option '{word}'", word, known, f"see `gpuyard {name} --help`")


def unknown_word(text: str, word: str, known: "Sequence[str]", otherwise: str | None = None) -> UserError:
    """Return the error, with the nearest of the known words as the hint; else `otherwise`, or all of them."""
    from difflib import get_close_matches

    near = get_close_matches(word, known, n=1, cutoff=0.7)
    return UserError(text, hint=f"did you mean `{near[0]}`?" if near else otherwise or f"it can be {', '.join(known)}")
