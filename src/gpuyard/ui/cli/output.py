"""How commands print: JSON for scripts, tables for people."""

import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON with stable keys.")
deadline_option = click.option(
    "--deadline",
    "deadline_s",
    type=click.FloatRange(min=0.1, max=600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a probe may take.",
)


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)
