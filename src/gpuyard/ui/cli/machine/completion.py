"""`gpuyard completion`: the script that lets a shell complete our commands and options."""

import click
from click.shell_completion import get_completion_class

from gpuyard.ui.cli.click_group import cli

_SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(_SHELLS))
def command(shell: str) -> None:
    """Print the script that completes commands in your shell.

    \b
    bash:  eval "$(gpuyard completion bash)"             in ~/.bashrc
    zsh:   eval "$(gpuyard completion zsh)"              in ~/.zshrc
    fish:  gpuyard completion fish > ~/.config/fish/completions/gpuyard.fish
    """
    completion = get_completion_class(shell)
    assert completion is not None
    click.echo(completion(cli, {}, "gpuyard", "_GPUYARD_COMPLETE").source())
