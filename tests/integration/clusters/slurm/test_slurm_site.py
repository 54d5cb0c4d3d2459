"""A real Slurm as a site: submissions run, are reported, and can be cancelled."""

import os
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from gpuyard.config import SlurmConfig
from gpuyard.engines.cluster.site import ClusterSubmission, Sighting, SiteRefused, SiteState, SiteUnreachable
from gpuyard.engines.cluster.slurm_commands import list_command
from gpuyard.engines.cluster.slurm_site import SlurmSite
from gpuyard.model.cluster_terms import ClusterTerms
from gpuyard.model.lease import Need
from tests.slurm_cluster import MAX_ARRAY_SIZE, SlurmCluster, needs_slurm

LIMIT_S = 60.0
CPU = Need(devices=0)
GPU = Need()
Tools = Callable[[str, str], Path]


@pytest.fixture
def site(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmSite]:
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    yield SlurmSite(SlurmConfig())
    subprocess.run(["scancel", "--quiet", f"--user={os.getuid()}"], check=True)
    until(lambda: not output_of("squeue", "--noheader"), "an empty queue")


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline, f"timeout: {what}"
        time.sleep(0.05)


def submission(folder: Path, script: str, count: int = 1, need: Need = CPU, **other: object) -> ClusterSubmission:
    """Make a submission with a unique token; its supervisor is a shell with the element's number as `$1`."""
    token = uuid.uuid4().hex
    terms = ClusterTerms(**{"need": need, "name": "train", **other})  # type: ignore[arg-type]
    own = folder / token
    own.mkdir()
    return ClusterSubmission(
        token=token, terms=terms, count=count, folder=str(own), supervisor=("/bin/sh", "-c", script, "sh")
    )


def seen(site: SlurmSite, *submissions: ClusterSubmission) -> dict[int, Sighting]:
    return {number: each for (_, number), each in site.report(submissions).sightings.items()}


def states(site: SlurmSite, *submissions: ClusterSubmission) -> list[SiteState]:
    return [each.at for _, each in sorted(seen(site, *submissions).items())]


def await_states(site: SlurmSite, sent: ClusterSubmission, wanted: Sequence[SiteState]) -> dict[int, Sighting]:
    until(lambda: states(site, sent) == list(wanted), f"{list(wanted)}")
    return seen(site, sent)


@needs_slurm
class TestRunning:
    def test_each_element_of_an_array_runs_with_its_number_and_its_own_gpu(
        self, site: SlurmSite, tmp_path: Path
    ) -> None:
        sent = submission(tmp_path, 'echo "$1 $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"; sleep 0.5', 4, need=GPU)
        began = time.time()
        site.submit(sent)
        found = await_states(site, sent, [SiteState.SUCCEEDED] * 4)
        outputs = [Path(sent.folder, f"{number}.out").read_text().split() for number in range(4)]
        assert [output[0] for output in outputs] == ["0", "1", "2", "3"]
        assert len({tuple(output[1:]) for output in outputs}) == 4
        for number, each in found.items():
            assert each.place == outputs[number][1]
            assert each.status == 0
            assert each.started_at is not None
            assert each.ended_at is not None
            assert began - 1 <= each.started_at <= each.ended_at <= time.time() + 1

    def test_names_may_contain_special_characters(self, site: SlurmSite, tmp_path: Path) -> None:
        folder = tmp_path / "100%a 'of' \"it\"\nand é"
        folder.mkdir()
        sent = submission(folder, "echo ok\n#SBATCH --hold", 2, name="a|b\n%j é")
        site.submit(sent)
        await_states(site, sent, [SiteState.SUCCEEDED] * 2)
        assert Path(sent.folder, "1.out").read_text() == "ok\n"

    def test_every_field_of_the_terms_reaches_slurm(self, site: SlurmSite, tmp_path: Path) -> None:
        choosy = SlurmSite(SlurmConfig(partition="main", options=("--hold",), nice_base=50))
        sent = submission(
            tmp_path,
            "true",
            3,
            need=Need(devices=2, model="fake"),
            ram_mb=99.5,
            cpus=3,
            limit_s=90.0,
            priority=20,
            at_most=2,
        )
        choosy.submit(sent)
        found = await_states(choosy, sent, [SiteState.PENDING] * 3)
        assert found[0].reason.startswith("JobHeldUser: ")
        shown = output_of("scontrol", "show", "job", found[0].id)
        for field in (
            "JobName=train",
            f"Comment=gpuyard:{sent.token}",
            "Partition=main",
            "TimeLimit=00:02:00",
            "Nice=30",
            "Requeue=0",
            "CPUs/Task=3",
            "MinMemoryNode=100M",
            "TresPerNode=gres:gpu:fake:2",
            "ArrayTaskThrottle=2",
        ):
            assert field in shown

    def test_nothing_of_the_daemons_environment_reaches_the_job(
        self, site: SlurmSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SECRET", "x")
        monkeypatch.setenv("SLURM_JOB_NAME", "outer")
        monkeypatch.setenv("SBATCH_HOLD", "1")
        sent = submission(tmp_path, "env")
        site.submit(sent)
        await_states(site, sent, [SiteState.SUCCEEDED])
        environment = Path(sent.folder, "0.out").read_text()
        assert "SECRET" not in environment
        assert "SLURM_JOB_NAME=train" in environment
        assert "SLURM_GET_USER_ENV" not in environment, "a login shell on the node would take seconds"


@needs_slurm
class TestLimits:
    def test_an_array_may_be_as_large_as_slurm_allows(self, site: SlurmSite, tmp_path: Path) -> None:
        assert site.most_in_submission == MAX_ARRAY_SIZE
        sent = submission(tmp_path, "true", MAX_ARRAY_SIZE, options=("--hold",))
        site.submit(sent)
        found = seen(site, sent)
        assert len(found) == MAX_ARRAY_SIZE
        site.cancel([each.id for each in found.values()])
        assert set(states(site, sent)) == {SiteState.CANCELLED}

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            ({"options": ("--partition=nope",)}, "invalid partition specified: nope"),
            ({"need": Need(devices=99)}, "Requested node configuration is not available"),
            ({"need": Need(model="other")}, "Requested node configuration is not available"),
            ({"options": ("--nonsense",)}, "unrecognized option '--nonsense'"),
            ({"options": ("--comment=\0",)}, "embedded null byte"),
        ],
    )
    def test_a_rejection_has_slurms_message(
        self, site: SlurmSite, tmp_path: Path, other: dict[str, object], message: str
    ) -> None:
        sent = submission(tmp_path, "true", **{"need": CPU, **other})  # type: ignore[arg-type]
        with pytest.raises(SiteRefused, match=message):
            site.submit(sent)


class TestCommands:
    """Fake commands of Slurm, for behaviour that the real ones do not show on demand."""

    @pytest.fixture
    def calls(self, tmp_path: Path, tools: Tools) -> Callable[..., list[str]]:
        """Puts commands on PATH that print this, and tells which were called."""
        record = tmp_path / "calls"
        record.touch()

        def put(**printed: str) -> list[str]:
            for name, text in printed.items():
                note = f"open({str(record)!r}, 'a').write({name!r} + chr(10))"
                tools(name, f"import sys; {note}; sys.stdin.read(); print({text!r}, end='')")
            return record.read_text().split()

        return put

    def test_a_missing_command_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        site = SlurmSite(SlurmConfig())
        with pytest.raises(SiteUnreachable, match="there is no sbatch on PATH") as caught:
            site.submit(submission(tmp_path, "true"))
        assert caught.value.hint
        with pytest.raises(SiteUnreachable, match="there is no squeue on PATH"):
            site.report([])
        assert site.most_in_submission == 1000

    def test_a_command_that_hangs_is_killed_with_its_children(self, tmp_path: Path, tools: Tools) -> None:
        pids = tmp_path / "pids"
        tools(
            "sbatch",
            "import os, subprocess, sys, time\n"
            "print('sbatch: error: sleeping and retrying', file=sys.stderr, flush=True)\n"
            "child = subprocess.Popen(['sleep', '600'])\n"
            f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
            "time.sleep(600)\n",
        )
        with pytest.raises(SiteUnreachable, match="did not answer within 2 s: sleeping and retrying"):
            SlurmSite(SlurmConfig(), limit_s=2.0).submit(submission(tmp_path, "true"))
        for pid in pids.read_text().split():
            until(lambda pid=pid: _is_gone(int(pid)), f"{pid} is gone")  # type: ignore[misc]

    def test_an_answer_of_sbatch_without_a_job_number_is_unreachable(
        self, tmp_path: Path, calls: Callable[..., list[str]]
    ) -> None:
        calls(sbatch="hello\n")
        with pytest.raises(SiteUnreachable, match="hello"):
            SlurmSite(SlurmConfig()).submit(submission(tmp_path, "true"))

    def test_jobs_missing_from_squeue_are_looked_up_in_sacct_once(
        self, tmp_path: Path, calls: Callable[..., list[str]]
    ) -> None:
        site = SlurmSite(SlurmConfig())
        sent = submission(tmp_path, "true", 3)
        calls(
            sbatch="17\n",
            squeue="",
            sacct="17_0|COMPLETED|0:0|1|2|n0\n17_1|TIMEOUT|0:0|1|2|n0\n17_2|NODE_FAIL|1:0|1|2|n1\n18_0|FAILED|1:0|1|2|n0\n",
        )
        site.submit(sent)
        assert states(site, sent) == [SiteState.SUCCEEDED, SiteState.TIMED_OUT, SiteState.LOST]
        assert states(site, sent) == [SiteState.SUCCEEDED, SiteState.TIMED_OUT, SiteState.LOST]
        assert calls() == ["sbatch", "squeue", "sacct", "squeue"]

    def test_a_site_without_accounting_is_asked_once(
        self, tmp_path: Path, calls: Callable[..., list[str]], tools: Tools
    ) -> None:
        site = SlurmSite(SlurmConfig())
        sent = submission(tmp_path, "true", 3)
        calls(sbatch="17\n", squeue="")
        asked = tmp_path / "asked"
        tools(
            "sacct", f"open({str(asked)!r}, 'a').write('x'); raise SystemExit('Slurm accounting storage is disabled')"
        )
        site.submit(sent)
        assert seen(site, sent) == {}
        assert seen(site, sent) == {}
        assert asked.read_text() == "x"

    def test_elements_are_matched_by_job_number_if_the_site_replaces_comments(
        self, tmp_path: Path, calls: Callable[..., list[str]]
    ) -> None:
        site = SlurmSite(SlurmConfig())
        sent = submission(tmp_path, "true", 2)
        calls(sbatch="17\n", squeue=listed("17", 0, "theirs") + listed("17", 1, "theirs"))
        site.submit(sent)
        assert states(site, sent) == [SiteState.RUNNING] * 2

    def test_a_foreign_job_with_a_reused_number_is_ignored(
        self, tmp_path: Path, calls: Callable[..., list[str]]
    ) -> None:
        site = SlurmSite(SlurmConfig())
        sent = submission(tmp_path, "true", 2)
        calls(sbatch="17\n", sacct="", squeue=listed("17", 0, "(null)") + listed("16", 0, "gpuyard:another"))
        site.submit(sent)
        assert seen(site, sent) == {}

    def test_the_offer_comes_from_the_settings(self, calls: Callable[..., list[str]]) -> None:
        calls(squeue="")
        site = SlurmSite(SlurmConfig(most_jobs=7, gpu_memory="24000M"))
        offer = site.report([]).offer
        assert (offer.trouble, offer.free, offer.most_jobs, offer.card_mb) == (None, None, 7, 24000.0)


def listed(job: str, number: int, comment: str) -> str:
    widths = [int(column.rpartition(":")[2]) for column in list_command(0)[-1].split(",")]
    cells = [job, str(number), "RUNNING", "0", "1700000000", "N/A", "n0", "None", comment]
    return "".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + "\n"


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
