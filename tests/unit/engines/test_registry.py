"""Which engines there are, and where each queue keeps what it hands over."""

from pathlib import Path

import pytest

from gpuyard.config import load_config
from gpuyard.core.job.job import Job, JobSpec
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.lease import Need
from gpuyard.engines.registry import check_engines, check_name, log_folders
from gpuyard.errors import UserError
from gpuyard.store.row_codec import lane_of


def configure(home: Path, text: str) -> None:
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(text)


def test_queues_that_share_a_folder_have_each_its_own_in_there(own_home: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    configure(own_home, f'[slurm]\nfolder = "{shared}"\n')
    queues = [tmp_path / name for name in ("one", "other")]
    for queue in queues:
        queue.mkdir()
    (own, first), (_, second) = map(log_folders, queues)
    assert own == queues[0] / "logs"
    assert (first.parent.parent, second.parent.parent) == (shared, shared)
    assert first != second
    assert log_folders(queues[0]) == [own, first], "and keeps it"


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ('[slurm]\nfolder = "rel/x"', "folder = 'rel/x' is not an absolute path"),
        ('[ray]\nfolder = "~nosuchuser/x"', "is not an absolute path"),
        ('[slurm]\ngpu_memory = "80Q"', "gpu_memory"),
        ('[slurm]\npartitoin = "big"', "did you mean `partition`?"),
    ],
)
def test_a_mistake_in_the_settings_is_told_and_doctor_tells_it_too(own_home: Path, said: str, complaint: str) -> None:
    configure(own_home, said)
    with pytest.raises(UserError) as caught:
        load_config()
    assert complaint in f"{caught.value} {caught.value.hint}"
    assert any(complaint in (each.problem or "") for each in check_engines())


def test_an_engine_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(UserError, match="there is no engine 'sulrm'") as caught:
        check_name("sulrm")
    assert caught.value.hint == "there are: local, slurm, ray"


def test_what_one_job_may_be_refused_for_sets_it_apart_from_others() -> None:
    def lane(**differs: object) -> object:
        spec = JobSpec(command=("true",), cwd="/", environment={}, need=Need(), engine="slurm", **differs)  # type: ignore[arg-type]
        return lane_of(Job(id=1, spec=spec, state=JobState.QUEUED, priority=0, user="me", submitted_at=0.0))

    plain = lane()
    assert lane() == plain
    for differs in ({"engine_options": ("--nosuch",)}, {"cpus": 999}, {"time_limit_s": 1e9}):
        assert lane(**differs) != plain
