"""The characters that a terminal can show: Unicode blocks, or ASCII only.

Nothing depends on colour alone: each part of a bar has its own character, each state its word.
"""

from collections.abc import Mapping

from msgspec import Struct

# Their fonts have only some of the block characters, and which ones is unknown.
_PLAIN_TERMINALS = ("linux", "vt", "ansi", "cons25")
_PLAIN_LOCALES = ("C", "POSIX")


class Glyphs(Struct, frozen=True, kw_only=True):
    """`own`, `kept` (ours, reserved and not used), `others`, `foreign` and `free` are the parts of a memory bar."""

    own: str = "█"
    kept: str = "▄"
    others: str = "▒"
    foreign: str = "×"  # noqa: RUF001 - it is a sign
    free: str = "·"
    levels: str = "▁▂▃▄▅▆▇█"
    rule: str = "─"
    dot: str = "·"
    ellipsis: str = "…"
    chosen: str = "▶"
    degree: str = "°C"
    is_unicode: bool = True

    def spell(self, text: str) -> str:
        """Replace characters that the terminal lacks with question marks."""
        return text if self.is_unicode or text.isascii() else text.encode("ascii", "replace").decode()


UNICODE = Glyphs()
ASCII = Glyphs(
    own="#", kept="=", others="+", foreign="x", free=".", levels="_.-=+*%#", rule="-", dot="|", ellipsis="~",
    chosen=">", degree="C", is_unicode=False,
)  # fmt: skip


def glyphs_for(environment: Mapping[str, str], encoding: str) -> Glyphs:
    is_plain = environment.get("TERM", "").startswith(_PLAIN_TERMINALS) or not encoding.lower().startswith("utf")
    return ASCII if is_plain or not _is_unicode_locale(environment) else UNICODE


def has_colour(environment: Mapping[str, str]) -> bool:
    return "NO_COLOR" not in environment and not environment.get("TERM", "").startswith("vt")


def _is_unicode_locale(environment: Mapping[str, str]) -> bool:
    """Return True without a locale, as in containers: the terminal behind it nearly always supports Unicode."""
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        value = environment.get(name, "")
        # Python itself sets C.UTF-8 if the locale is C, for its own files.
        is_pythons = name == "LC_CTYPE" and value == "C.UTF-8" and environment.get("LANG") in _PLAIN_LOCALES
        if value and not is_pythons:
            return "utf" in value.lower()
    return True
