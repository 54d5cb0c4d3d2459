"""Checks the placeholders of a submission against the values that it has, and finds the values that vary."""

from collections.abc import Iterable, Sequence

from gpuyard.core.job.placeholders import ArrayElement, check_known, check_used
from gpuyard.core.job.sweep import refuse_alike, variable_of
from gpuyard.core.option_values import Options


def check_placeholders(command: Sequence[str], options: Options, elements: Iterable[ArrayElement]) -> None:
    """Refuse placeholders that have no value, and values of a sweep that nothing uses.

    A column of a table need not be used. The runs of a batch may share a command: they differ in their folders."""
    texts = [*command, *options["env"]]
    if "concurrency" in options:
        return
    if "array" in options:
        check_known(texts, ["index"], "--array")
        return
    names = list(next(iter(elements)).values)
    refuse_alike(names)
    if names:
        check_known(texts, names, "--sweep" if options["sweep"] else "the CSV file")
    if options["sweep"]:
        files = filter(None, (options["output"], options["error"]))
        mentioned = [f"{{{name}}}" for name in names if any(variable_of(name) in text for text in texts)]
        check_used([*texts, *files, *mentioned], names)


def varying_names(elements: Sequence[ArrayElement]) -> tuple[str, ...]:
    """Return the names of the values that differ between the jobs."""
    first = elements[0].values
    return tuple(name for name in first if any(each.values[name] != first[name] for each in elements))
