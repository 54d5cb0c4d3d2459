"""Make a label of an entry: the object that the renderer gets, and the label's name. Pure.

The renderer gets an object with the entry's other keys, overridden by the label's keys, or with the label itself as
`label`. The name is the label's `name`, else its `id`, else the label itself if it is a string. The name of a number,
or of a label without any of these, starts with its scene and actor, because other scenes may have the same numbers.
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


class LabelGroup:
    """The labels of one scene and actor, whose paths are as written in the manifest."""

    def __init__(self, scene: str | None, actor: str | None) -> None:
        self.labels: list[Label] = []
        self._name = name_of_pair(scene, actor)
        self._seen = 0

    def make_label(self, extras: dict[str, Any], label: Any, *, is_only: bool) -> Label:
        """Return the label. `is_only`: the entry has one label; its own keys name the label, and may be all of it."""
        self._seen += 1
        if type(label) is dict:
            value = {**extras, **label} if extras else label
        elif label is None and is_only:
            value = extras
        elif type(label) in (str, int, float):
            value = {**extras, "label": label}
        else:
            raise UserError(f"a label is a string, a number or an object, not {KINDS[type(label)]}")
        named = value if is_only else label if type(label) is dict else {}
        return Label(name=folder_name(_given_name(named) or self._default_name(label)), value=value)

    def _default_name(self, label: Any) -> str:
        if type(label) is str:
            return _check_name(label)
        return f"{self._name}-{label}" if type(label) in (int, float) else f"{self._name}-label{self._seen}"


def _given_name(named: dict[str, Any]) -> str | None:
    for key in ("name", "id"):
        given = named.get(key)
        if given is not None:
            if type(given) not in (str, int, float):
                raise UserError(f"its {key} is {KINDS[type(given)]}, not a string or a number")
            return _check_name(str(given))
    return None


def _check_name(name: str) -> str:
    if not name:
        raise UserError("its name is empty")
    return name
