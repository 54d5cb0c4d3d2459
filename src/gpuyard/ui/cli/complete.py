"""`gpuyard completion`: scripts that ask what to complete, and the answers: verbs, options, values, ids, states.

A script runs `gpuyard` with _GPUYARD_COMPLETE, COMP_WORDS and COMP_CWORD set. The daemon is asked only if one runs, for
at most half a second; whatever goes wrong completes nothing, silently.
"""

import os
import shlex
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

from gpuyard.client.fast_http import connect
from gpuyard.errors import GpuyardError
from gpuyard.model.option import Option
from gpuyard.ui.cli.command_grammar import HELP, Arguments, Typed, Verb
from gpuyard.ui.cli.jobs.job_text import STATES, job_name
from gpuyard.ui.cli.verbs import VERBS, import_verb

_KEYS = {"state": STATES, "tag": None, "name": None, "user": None, "since": ("10m", "1h", "12h", "1d", "7d")}
_FILES = {"from": "file", "stdin": "file", "output": "file", "error": "file", "cwd": "dir", "mount": "file"}
_VALUES = {"engine": ("local", "slurm", "ray"), "retry-on": ("failed", "timeout", "oom", "device"), "state": STATES}

SCRIPTS = {
    "bash": """\
_gpuyard_completion() {
    local line IFS=$'\\n'
    COMPREPLY=()
    for line in $(COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD _GPUYARD_COMPLETE=bash_complete "$1"); do
        case $line in
            dir,*) compopt -o dirnames ;;
            file,*) compopt -o default ;;
            *) COMPREPLY+=("${line#*,}") ;;
        esac
    done
}
complete -o nosort -F _gpuyard_completion gpuyard
""",
    "zsh": """\
#compdef gpuyard
_gpuyard_completion() {
    local -a lines plain described
    lines=("${(@f)$(COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT-1)) _GPUYARD_COMPLETE=zsh_complete gpuyard)}")
    local kind value text
    for kind value text in $lines; do
        case $kind in
            dir) _path_files -/ ;;
            file) _path_files ;;
            *) if [[ $text == _ ]]; then plain+=("$value"); else described+=("${value//:/\\\\:}:$text"); fi ;;
        esac
    done
    (( $#described )) && _describe -V '' described -U
    (( $#plain )) && compadd -U -V unsorted -a plain
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _gpuyard_completion "$@"
else
    compdef _gpuyard_completion gpuyard
fi
""",
    "fish": """\
function _gpuyard_completion
    for line in (COMP_WORDS=(commandline -cp) COMP_CWORD=(commandline -t) _GPUYARD_COMPLETE=fish_complete gpuyard)
        set -l parts (string split -m 1 "," -- $line)
        switch $parts[1]
            case dir
                __fish_complete_directories $parts[2]
            case file
                __fish_complete_path $parts[2]
            case '*'
                echo $parts[2]
        end
    end
end
complete --no-files --command gpuyard --arguments "(_gpuyard_completion)"
""",
}


class Completion(NamedTuple):
    """A word; or with the kind "file" or "dir", what the shell itself completes."""

    word: str
    text: str = ""
    kind: str = "plain"


def answer_shell(request: str) -> str:
    """Return the lines for a script that asks with `_GPUYARD_COMPLETE=SHELL_complete`."""
    shell = request.partition("_")[0]
    words, place = _split(os.environ.get("COMP_WORDS", "")), os.environ.get("COMP_CWORD", "")
    if shell == "fish":
        incomplete = next(iter(_split(place)), "")
        before = words[1:-1] if incomplete and words[-1] == incomplete else words[1:]
    else:
        at = int(place) if place.isdecimal() else len(words)
        before, incomplete = words[1:at], words[at] if at < len(words) else ""
    found = _complete(before, incomplete)
    if shell == "zsh":
        return "".join(f"{each.kind}\n{each.word}\n{each.text or '_'}\n" for each in found)
    tabs = (f"\t{each.text}" if shell == "fish" and each.text else "" for each in found)
    return "".join(f"{each.kind},{each.word}{tab}\n" for each, tab in zip(found, tabs, strict=True))


def _split(text: str) -> list[str]:
    """Split as a shell does; a word whose quote is still open ends with the text."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    try:
        words.extend(lexer)
    except ValueError:
        words.append(lexer.token)
    return words


def _complete(before: list[str], incomplete: str) -> list[Completion]:
    if not before:
        if incomplete.startswith("-"):
            return _words(("--version", "--help"), incomplete)
        return [Completion(verb, VERBS[verb]) for verb in sorted(VERBS) if verb.startswith(incomplete)]
    return _complete_verb(import_verb(before[0]).VERB, before[1:], incomplete) if before[0] in VERBS else []


def _complete_verb(verb: Verb, before: list[str], incomplete: str) -> list[Completion]:
    """Complete an option, the value of one, an argument, or the name of a command below the verb."""
    options = {form: each for each in (*verb.options, HELP) for form in (f"--{each.name}", f"-{each.short}")}
    arguments: list[str] = []
    left = iter(before)
    for word in left:
        option = options.get(word)
        if option is None and not word.startswith("-"):
            if word in verb.commands:
                return _complete_verb(verb.commands[word].VERB, [*left], incomplete)
            arguments.append(word)
        if word == "--" or (arguments and verb.arguments is not None and verb.arguments.is_program):
            return [Completion(incomplete, kind="file")]
        if option is not None and not option.is_flag and next(left, None) is None:
            return _complete_value(option, incomplete)
    name, equals, value = incomplete.partition("=")
    if equals and name in options:
        return [each._replace(word=f"{name}={each.word}") for each in _complete_value(options[name], value)]
    if incomplete.startswith("-"):
        typed = {options[word].name for word in before if word in options and not options[word].is_repeatable}
        shown = [each for each in (*verb.options, HELP) if not each.is_hidden and each.name not in typed]
        return [Completion(f"--{each.name}", each.help) for each in shown if f"--{each.name}".startswith(incomplete)]
    found, known = _words(sorted(verb.commands), incomplete), verb.arguments
    if known is not None and known.choices:
        found += _words(known.choices, incomplete)
    elif known is not None:
        found += _selection(arguments, incomplete) if "ID" in known.metavar else [Completion(incomplete, kind="file")]
    return found


def _complete_value(option: Option, incomplete: str) -> list[Completion]:
    if option.name in _FILES:
        return [Completion(incomplete, kind=_FILES[option.name])]
    if option.metavar == "IDS":
        return _ids(incomplete)
    if option.name in ("tag", "name"):
        return _words(_values(option.name), incomplete)
    return _words(option.choices or _VALUES.get(option.name, ()), incomplete)


def _selection(before: list[str], incomplete: str) -> list[Completion]:
    """Complete an id, or a key and its values. bash splits words at `=`: there, the words before end in KEY and `=`."""
    if incomplete == "=" and before and before[-1] in _KEYS:
        return _words(_values(before[-1]), "")
    if len(before) > 1 and before[-1] == "=" and before[-2] in _KEYS:
        return _listed(before[-2], "", incomplete)
    key, equals, value = incomplete.partition("=")
    if equals and key in _KEYS:
        return _listed(key, f"{key}=", value)
    keys = [Completion(f"{each}=") for each in _KEYS if incomplete and each.startswith(incomplete)]
    return [*keys, *_ids(incomplete)]


def _listed(key: str, prefix: str, value: str) -> list[Completion]:
    """Complete the last value of a list such as `failed,canc`."""
    head, comma, last = value.rpartition(",")
    return [Completion(f"{prefix}{head}{comma}{each}") for each in _values(key) if each.startswith(last)]


def _values(key: str) -> Iterable[str]:
    fixed = _KEYS[key]
    return dict.fromkeys(str(job[key]) for job in _jobs() if job[key]) if fixed is None else fixed


def _ids(incomplete: str) -> list[Completion]:
    return [
        Completion(str(job["id"]), f"{job['state']}: {job_name(job)}"[:60])
        for job in _jobs()
        if str(job["id"]).startswith(incomplete)
    ]


def _words(words: Iterable[str], incomplete: str) -> list[Completion]:
    return [Completion(word) for word in words if word.startswith(incomplete)]


@cache
def _jobs() -> tuple[dict[str, Any], ...]:
    """Return the newest jobs; none if no daemon runs, or if it does not answer at once."""
    try:
        with connect(start=False, on_notice=lambda _: None) as daemon:
            return tuple(daemon.request("GET", "/jobs", {"order": "newest", "limit": "200"}, None, 0.5)["jobs"])
    except (GpuyardError, OSError):
        return ()


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
