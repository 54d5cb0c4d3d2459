"""Names of engines, and the folders that queues use for clusters."""

from pathlib import Path

import pytest

from gpuyard.config import load_config
from gpuyard.engines.open_cluster_engine import check_engines, check_name, log_folders
from gpuyard.errors import UserError
from gpuyard.model.job import Job
from gpuyard.model.job_spec import JobSpec
from gpuyard.model.lease import Need
from gpuyard.model.lifecycle import JobState
from gpuyard.store.row_codec import lane_of


def configure(home: Path, text: str) -> None:
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(text)


def test_queues_that_share_a_folder_have_subfolders_of_their_own(own_home: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    configure(own_home, f'[slurm]\nfolder = "{shared}"\n')
    queues = [tmp_path / name for name in ("one", "other")]
    for queue in queues:
        queue.mkdir()
    (own, first), (_, second) = map(log_folders, queues)
    assert own == queues[0] / "logs"
    assert (first.parent.parent, second.parent.parent) == (shared, shared)
    assert first != second
    assert log_folders(queues[0]) == [own, first], "the name does not change"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('[slurm]\nfolder = "rel/x"', "folder = 'rel/x' is not an absolute path"),
        ('[ray]\nfolder = "~nosuchuser/x"', "is not an absolute path"),
        ('[slurm]\ngpu_memory = "80Q"', "gpu_memory"),
        ('[slurm]\npartitoin = "big"', "did you mean partition?"),
    ],
)
def test_a_mistake_in_the_settings_is_reported_also_by_doctor(own_home: Path, content: str, complaint: str) -> None:
    configure(own_home, content)
    with pytest.raises(UserError) as caught:
        load_config()
    assert complaint in str(caught.value)
    assert any(complaint in (each.problem or "") for each in check_engines())


def test_an_unknown_engine_is_refused_with_a_list_of_engines() -> None:
    with pytest.raises(UserError, match="there is no engine 'sulrm'") as caught:
        check_name("sulrm")
    assert caught.value.hint == "there are: local, slurm, ray"


def test_jobs_that_a_site_may_refuse_for_different_reasons_have_different_lanes() -> None:
    def lane(**differs: object) -> object:
        spec = JobSpec(command=("true",), cwd="/", environment={}, need=Need(), engine="slurm", **differs)  # type: ignore[arg-type]
        return lane_of(Job(id=1, spec=spec, state=JobState.QUEUED, priority=0, user="me", submitted_at=0.0))

    plain = lane()
    assert lane() == plain
    for differs in ({"engine_options": ("--nosuch",)}, {"cpus": 999}, {"time_limit_s": 1e9}):
        assert lane(**differs) != plain
