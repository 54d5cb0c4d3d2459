"""Parses the command line of a queue verb from its table, without click.

It accepts only correct command lines. It leaves all others (unknown options, missing values, `--help`) to click, which
has the error messages. A command line that both accept has the same meaning for both.
"""

from gpuyard.ui.cli.verb_options import Option, Typed, Verb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


def parse(verb: Verb, arguments: list[str]) -> Typed | None:
    """Return the parsed command line, or None if click has to parse it."""
    options: dict[str, str | bool | list[str]] = {}
    words: list[str] = []
    is_program = verb.words is not None and verb.words.is_program
    left = iter(arguments)
    for word in left:
        if word == "--":
            words += left
        elif _is_word(word, is_program=is_program):
            words.append(word)
            if is_program:
                words += left
        elif not _take_option(verb, word, left, options):
            return None
    return Typed(options, words) if _has_right_words(verb, words) else None


def _is_word(word: str, *, is_program: bool) -> bool:
    """Whether it is an argument, and not an option. `-5` is a number, except where a program is expected."""
    return word == "-" or not word.startswith("-") or (word[1:].isdecimal() and not is_program)


def _take_option(verb: Verb, word: str, left: "Iterator[str]", options: dict[str, str | bool | list[str]]) -> bool:
    name, equals, value = word.partition("=")
    option = _find(verb, name)
    if option is None or (equals and (option.is_flag or not name.startswith("--"))):
        return False
    if option.is_flag:
        options[option.name] = True
        return True
    given = value if equals else next(left, None)
    if given is None:
        return False
    if option.is_repeatable:
        earlier = options.get(option.name)
        options[option.name] = [*earlier, given] if isinstance(earlier, list) else [given]
    else:
        options[option.name] = given
    return True


def _find(verb: Verb, name: str) -> Option | None:
    for option in verb.options:
        if name in (f"--{option.name}", f"-{option.short}"):
            return option
    return None


def _has_right_words(verb: Verb, words: list[str]) -> bool:
    if verb.words is None:
        return not words
    if verb.words.choices and not all(word in verb.words.choices for word in words):
        return False
    return verb.words.is_many or len(words) == 1
