"""What tells jobs apart in few columns: the arguments of a command, and the end of a long text. All pure."""

import re

from gpuyard.ui.cli.text_table import cell_width, cut

# Narrower texts lose their end, not their middle.
_LEAST_FOR_END = 12
_INTERPRETER = re.compile(r"(.*/)?(python[\d.]*|bash|sh|zsh|julia|Rscript|node|ruby|perl)")


def arguments_text(command: str) -> str:
    """Return the command without its program and, for an interpreter, without its script or module.

    `python -u train.py --lr 0.1` becomes `--lr 0.1`.
    """
    program, _, rest = command.strip().partition(" ")
    words = rest.split()
    if _INTERPRETER.fullmatch(program):
        script = next((at for at, word in enumerate(words) if not word.startswith("-")), len(words))
        # With -c, the word after it is a program of its own, and says what the job does.
        words = words if "-c" in words[:script] else words[script + 1 :]
    return " ".join(words)


def cut_middle(text: str, width: int, ellipsis: str) -> str:
    """Return the text in at most this many cells, with an ellipsis before its last two fifths: runs differ there."""
    if cell_width(text) <= width or width < _LEAST_FOR_END:
        return cut(text, width, ellipsis)
    end = text[-(width * 2 // 5) :]
    while cell_width(end) > width * 2 // 5:
        end = end[1:]
    return cut(text, width - cell_width(end), ellipsis) + end
