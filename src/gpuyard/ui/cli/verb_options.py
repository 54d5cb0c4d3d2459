"""Queue verbs as plain data: options, arguments and help.

`fast_parser` parses command lines from it without importing click; `click_group` makes click commands of it for
`--help`, completion and error messages. Neither this module nor a verb may import what takes milliseconds (click,
msgspec, rich, typing): scripts call `gpuyard submit` in loops."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


class Option:
    """`--name METAVAR`, or a flag without a metavar; `short` is its one-letter form."""

    __slots__ = ("is_repeatable", "metavar", "name", "short", "text")

    def __init__(
        self, name: str, metavar: str | None, text: str, *, short: str | None = None, is_repeatable: bool = False
    ) -> None:
        self.name = name
        self.metavar = metavar
        self.text = text
        self.short = short
        self.is_repeatable = is_repeatable

    @property
    def is_flag(self) -> bool:
        return self.metavar is None


class Arguments:
    """The positional arguments: one, one of `choices`, many, or a program with all arguments that follow."""

    __slots__ = ("choices", "is_many", "is_program", "metavar")

    def __init__(
        self, metavar: str, *, choices: "Sequence[str]" = (), is_many: bool = False, is_program: bool = False
    ) -> None:
        self.metavar = metavar
        self.choices = choices
        self.is_many = is_many or is_program
        self.is_program = is_program


class Verb:
    """`text` is the help; its first line is the summary."""

    __slots__ = ("arguments", "options", "text")

    def __init__(self, text: str, options: "Sequence[Option]" = (), arguments: Arguments | None = None) -> None:
        self.text = text
        self.options = options
        self.arguments = arguments


class Typed:
    """A parsed command line: options by name, with their values as typed, and the positional arguments."""

    __slots__ = ("arguments", "options")

    def __init__(self, options: "dict[str, str | bool | list[str]]", arguments: list[str]) -> None:
        self.options = options
        self.arguments = arguments

    def flag(self, name: str) -> bool:
        return self.options.get(name) is True

    def text(self, name: str) -> str | None:
        value = self.options.get(name)
        return value if isinstance(value, str) else None


JSON = Option("json", None, "Print JSON with stable keys.")
IDS = "17, 17-20, name=big, tag=night or all"
SEVERAL = Arguments("IDS...", is_many=True)
ONE = Arguments("ID")
