"""What a label's folder is called: never the same for two, and always a name that a folder can have."""

from hypothesis import given
from hypothesis import strategies as st

from gpuyard.recipes.render.output_names import folder_name, name_of_pair

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300)
CLOSE = st.text(st.sampled_from("a%2F/~.\n"), min_size=1, max_size=12)


@given(NAMES | CLOSE)
def test_any_name_becomes_one_that_a_folder_can_have(name: str) -> None:
    folder = folder_name(name)
    assert 0 < len(folder.encode()) <= 200
    assert "/" not in folder
    assert not folder.startswith(".")
    assert folder.isprintable()


@given(NAMES | CLOSE, NAMES | CLOSE)
def test_two_names_never_meet(one: str, other: str) -> None:
    assert (folder_name(one) == folder_name(other)) == (one == other)


def test_plain_names_stay_as_they_are() -> None:
    assert [folder_name(name) for name in ("a", "0017", "shot-3_b.v2", "-x")] == ["a", "0017", "shot-3_b.v2", "-x"]


def test_long_names_keep_their_beginning_and_differ() -> None:
    one, other = folder_name("é" * 300 + "1"), folder_name("é" * 300 + "2")
    assert one.startswith("é" * 80)
    assert one != other


def test_a_pair_is_called_after_its_files_and_differs_by_their_folders() -> None:
    assert name_of_pair("rooms/a.ply", "walks/run/*.ply").startswith("a-run-")
    assert name_of_pair("rooms/a.ply", "walks/run/").startswith("a-run-")
    assert name_of_pair(None, "*.ply").startswith("*-")
    assert name_of_pair("x/a.ply", None) != name_of_pair("y/a.ply", None) != name_of_pair(None, "y/a.ply")
