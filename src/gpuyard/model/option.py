"""An option of a command line or of a submission, as plain data. Imports nothing: scripts call commands in loops."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal, Self

    Kind = Literal["flag", "whole", "number", "size", "time", "choice", "text", "word", "texts", "ids"]


class Option:
    """One option: `--name METAVAR`, or a flag where the kind is "flag"; `short` is its one-letter form. `kind` says how
    the value is parsed (`model/option_values.py`); `least` and `most` bound numbers and times, and a size may be 0 if
    `least` is. `default` is the value as a user would type it, and `note` describes the default where it is not a
    single value. "texts" and "ids" may be given several times. `heading` is that of the help; options with `is_hidden`
    are not in the help."""

    def __init__(  # noqa: PLR0913 - the columns of the table
        self,
        name: str,
        kind: "Kind",
        metavar: str | None,
        help: str,  # noqa: A002 - as argparse calls it
        *,
        short: str | None = None,
        default: str | None = None,
        note: str | None = None,
        least: float | None = None,
        most: float | None = None,
        choices: tuple[str, ...] = (),
        heading: str = "",
        is_hidden: bool = False,
    ) -> None:
        self.name, self.kind, self.metavar, self.help, self.short = name, kind, metavar, help, short
        self.default, self.note, self.least, self.most, self.choices = default, note, least, most, choices
        self.heading, self.is_hidden = heading, is_hidden
        self.is_flag, self.is_repeatable = kind == "flag", kind in ("texts", "ids")

    @property
    def help_with_default(self) -> str:
        default = self.note or self.default
        return f"{self.help} [{default}]" if default else self.help

    def but(self, **changes: object) -> "Self":
        """Return the same option with other fields."""
        changed = object.__new__(type(self))
        changed.__dict__.update(self.__dict__, **changes)
        return changed
