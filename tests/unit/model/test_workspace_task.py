import pytest

from gpuyard.model.job_spec import place_of


@pytest.mark.parametrize(("labels", "place"), [
    ([], "cpu"),
    (["0"], "gpu0"),
    (["0", "3"], "gpu0_3"),
    ([None], "gpux"),
    (["0:1"], "gpu0-1"),
    (["amd:0", "amd:1"], "gpu-amd-0_amd-1"),
])  # fmt: skip
def test_the_place_of_a_task_is_a_valid_part_of_a_tmux_session_name(labels: list[str | None], place: str) -> None:
    assert place_of(labels) == place
