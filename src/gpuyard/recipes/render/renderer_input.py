"""One label of an entry: what the renderer gets of it, and what it is called. Pure.

The renderer gets an object: the entry's other keys, and over them the label's, or the label itself as `label`. A label
is called by its `name`, else its `id`, else by itself where it is a string. A number, and a label with nothing of all
this, is called after its scene and actor: other scenes may well have the same numbers.
"""

from typing import Any

from gpuyard.errors import UserError
from gpuyard.recipes.render.output_names import folder_name, name_of_pair
from gpuyard.residency.planning.render_units import Label

OWN_KEYS = frozenset({"scene", "actor", "labels", "label"})
KINDS = {
    dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number", bool: "true or false",
    type(None): "null",
}  # fmt: skip


class Pair:
    """The labels of one scene and actor, which are here as the manifest names them."""

    def __init__(self, scene: str | None, actor: str | None) -> None:
        self.labels: list[Label] = []
        self._name = name_of_pair(scene, actor)
        self._seen = 0

    def label(self, extras: dict[str, Any], label: Any, *, is_alone: bool) -> Label:
        """An entry that has but one label also names it, and may itself be all there is of it."""
        self._seen += 1
        if type(label) is dict:
            value = {**extras, **label} if extras else label
        elif label is None and is_alone:
            value = extras
        elif type(label) in (str, int, float):
            value = {**extras, "label": label}
        else:
            raise UserError(f"a label is a string, a number or an object, not {KINDS[type(label)]}")
        named = value if is_alone else label if type(label) is dict else {}
        return Label(name=folder_name(_given_name(named) or self._made_name(label)), value=value)

    def _made_name(self, label: Any) -> str:
        if type(label) is str:
            return _checked(label)
        return f"{self._name}-{label}" if type(label) in (int, float) else f"{self._name}-label{self._seen}"


def _given_name(named: dict[str, Any]) -> str | None:
    for key in ("name", "id"):
        given = named.get(key)
        if given is not None:
            if type(given) not in (str, int, float):
                raise UserError(f"its {key} is {KINDS[type(given)]}, not a string or a number")
            return _checked(str(given))
    return None


def _checked(name: str) -> str:
    if not name:
        raise UserError("its name is empty")
    return name
