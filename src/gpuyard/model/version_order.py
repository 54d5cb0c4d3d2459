"""Which of two versions is newer. Only a newer command restarts an older daemon, so two environments that are used in
turn never restart each other's. Versions that cannot be ordered are different, and neither is newer.
"""

import re

# The forms that PEP 440 allows for released and pre-released versions. The part after a "+" is not compared.
_SHAPE = re.compile(
    r"v?(?P<release>\d+(?:\.\d+)*)"
    r"(?:[-_.]?(?P<stage>a|alpha|b|beta|c|rc|pre|preview)[-_.]?(?P<stage_number>\d*))?"
    r"(?:\.?post(?P<post>\d*))?"
    r"(?:\.?dev(?P<dev>\d*))?"
    r"(?:\+[a-z0-9.]+)?",
    re.IGNORECASE,
)


def is_newer(version: str, other: str | None) -> bool:
    """Return whether `version` comes after `other`. False where the two cannot be ordered."""
    if other is None:
        return True
    key, other_key = _order(version), _order(other)
    return key is not None and other_key is not None and key > other_key


def _order(version: str) -> tuple[tuple[int, ...], tuple[int, int], int, tuple[int, int]] | None:
    match = _SHAPE.fullmatch(version) if len(version) <= 100 else None
    if match is None:
        return None
    numbers = [int(number) for number in match["release"].split(".")]
    while numbers[1:] and numbers[-1] == 0:  # 0.2 and 0.2.0 are one version
        numbers.pop()
    stage, post, dev = match["stage"], match["post"], match["dev"]
    # 1.0.dev1 comes before 1.0a1; so a development version of a final release counts as below all stages.
    below = -1 if stage is None and post is None and dev is not None else 3
    rank = (below, 0) if stage is None else ({"a": 0, "b": 1}.get(stage[0].lower(), 2), int(match["stage_number"] or 0))
    return tuple(numbers), rank, -1 if post is None else int(post or 0), (1, 0) if dev is None else (0, int(dev or 0))
