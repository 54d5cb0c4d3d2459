"""An option of a command line or of a submission, as plain data. Imports nothing: scripts call commands in loops."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    Kind = Literal["flag", "whole", "number", "size", "time", "choice", "text", "word", "texts", "ids"]


class Option:
    """One option: `--name METAVAR`, or a flag where the kind is "flag"; `short` is its one-letter form.

    `kind` says how the value is parsed (`model/option_values.py`); `least` and `most` bound numbers and times, and a
    size may be 0 if `least` is. `default` is the value as a user would type it, and `note` describes the default where
    it is not a single value. "texts" and "ids" may be given several times. `label` is what the form of the web page
    calls it.

    `is_local`: only this machine can fulfil it, and not another engine. `is_for_gpu`: meaningless without a GPU.
    `makes_many`: one submission becomes many jobs. `is_for_batch`: only a batch takes it, and `gpuyard submit` does
    not. `is_hidden`: not in the help.
    """

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
        label: str | None = None,
        is_local: bool = False,
        is_for_gpu: bool = False,
        makes_many: bool = False,
        is_for_batch: bool = False,
        is_hidden: bool = False,
    ) -> None:
        self.name, self.kind, self.metavar, self.help, self.short = name, kind, metavar, help, short
        self.default, self.note = default, note
        self.least, self.most, self.choices, self.label = least, most, choices, label
        self.is_local, self.is_for_gpu = is_local, is_for_gpu
        self.makes_many, self.is_for_batch, self.is_hidden = makes_many, is_for_batch, is_hidden

    @property
    def is_flag(self) -> bool:
        return self.kind == "flag"

    @property
    def is_repeatable(self) -> bool:
        return self.kind in ("texts", "ids")

    @property
    def help_with_default(self) -> str:
        default = self.note or self.default
        return f"{self.help} [{default}]" if default else self.help

    def but(self, **changes: object) -> "Option":
        """Return the same option with other fields."""
        changed = object.__new__(Option)
        changed.__dict__.update(self.__dict__, **changes)
        return changed
