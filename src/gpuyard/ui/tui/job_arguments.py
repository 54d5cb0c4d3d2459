"""The arguments of a job's command, which tell jobs with the same name apart. All pure."""

import re

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
