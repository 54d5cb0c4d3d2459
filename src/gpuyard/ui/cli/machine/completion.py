"""`gpuyard completion`: the script that lets a shell complete our commands and options."""

import sys

from gpuyard.ui.cli.complete import SCRIPTS
from gpuyard.ui.cli.verb_options import Arguments, Typed, Verb

VERB = Verb(
    """Print the script that completes commands in your shell.

    \b
    bash:  eval "$(gpuyard completion bash)"             in ~/.bashrc
    zsh:   eval "$(gpuyard completion zsh)"              in ~/.zshrc
    fish:  gpuyard completion fish > ~/.config/fish/completions/gpuyard.fish
    """,
    arguments=Arguments("{bash|zsh|fish}", choices=tuple(SCRIPTS)),
)


def run(typed: Typed) -> int:
    sys.stdout.write(SCRIPTS[typed.arguments[0]])
    return 0
