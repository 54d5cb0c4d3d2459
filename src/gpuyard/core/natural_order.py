"""Sort names in natural order: `f2` before `f10`."""


def natural_order(path: str) -> tuple[list[list[str | int]], str]:
    """Return a sort key in which digits count as numbers, folder by folder."""
    import re

    parts = [re.split(r"([0-9]+)", part) for part in path.split("/")]
    return [[int(text) if at % 2 else text for at, text in enumerate(part)] for part in parts], path
