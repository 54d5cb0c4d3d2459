"""Folder names of labels: unique, and always valid."""

from hypothesis import given
from hypothesis import strategies as st

from gpuyard.recipes.render.manifest import folder_name, name_of_pair

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300)
CLOSE = st.text(st.sampled_from("a%2F/~.\n"), min_size=1, max_size=12)


@given(NAMES | CLOSE)
def test_any_name_becomes_a_valid_folder_name(name: str) -> None:
    folder = folder_name(name)
    assert 0 < len(folder.encode()) <= 200
    assert "/" not in folder
    assert not folder.startswith(".")
    assert folder.isprintable()


@given(NAMES | CLOSE, NAMES | CLOSE)
def test_different_names_give_different_folders(one: str, other: str) -> None:
    assert (folder_name(one) == folder_name(other)) == (one == other)


def test_plain_names_are_not_changed() -> None:
    assert [folder_name(name) for name in ("a", "0017", "shot-3_b.v2", "-x")] == ["a", "0017", "shot-3_b.v2", "-x"]


def test_a_pair_is_named_after_its_files_and_their_folders_make_it_unique() -> None:
    assert name_of_pair("rooms/a.ply", "walks/run/*.ply").startswith("a-run-")
    assert name_of_pair("rooms/a.ply", "walks/run/").startswith("a-run-")
    assert name_of_pair(None, "*.ply").startswith("*-")
    assert name_of_pair("x/a.ply", None) != name_of_pair("y/a.ply", None) != name_of_pair(None, "y/a.ply")
