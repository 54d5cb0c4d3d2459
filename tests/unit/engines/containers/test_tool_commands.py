"""The command lines of podman, docker and apptainer."""

import shlex

import pytest
from msgspec.structs import replace

from gpuyard.engines.containers import ContainedProgram, container_command, container_name, remove_command
from gpuyard.model.container import Container, Mount

PROGRAM = ContainedProgram(
    container=Container(
        image="lab/torch:2",
        mounts=(Mount(source="/data/a,b", target="/data", is_read_only=True),),
        options=("--network=host",),
        tool="podman",
    ),
    name="gpuyard-1234-17.1",
    command=("python", "train.py"),
    cwd="/home/anne/work",
    variables=("HF_TOKEN", "CUDA_VISIBLE_DEVICES"),
    uid=1000,
    gid=1000,
    groups=(1000, 44),
    labels=(("gpuyard.job", "17"),),
    devices=("--device", "nvidia.com/gpu=GPU-1"),
    shm_mb=512,
)


def command(tool: str, **changes: object) -> str:
    program = replace(PROGRAM, container=replace(PROGRAM.container, tool=tool), **changes)
    return shlex.join(container_command(program))


def test_rootless_podman_keeps_the_user_and_takes_variables_by_name() -> None:
    assert command("podman") == (
        "podman run --rm --name gpuyard-1234-17.1 --log-driver none --label gpuyard.job=17 --userns keep-id"
        " --group-add keep-groups --user 1000:1000 --security-opt label=disable --init --shm-size 512m"
        " --device nvidia.com/gpu=GPU-1 --mount type=bind,source=/home/anne/work,target=/home/anne/work"
        " --mount 'type=bind,\"source=/data/a,b\",target=/data,ro' --env HF_TOKEN --env CUDA_VISIBLE_DEVICES"
        " --workdir /home/anne/work --network=host lab/torch:2 python train.py"
    )


def test_docker_gets_the_users_numbers_and_groups_and_podman_of_root_too() -> None:
    line = command("docker")
    assert " --user 1000:1000 --group-add 44 " in line
    assert "userns" not in line
    assert " --init " in command("docker", has_init=False)
    assert " --init " not in command("podman", has_init=False)
    line = command("podman", uid=0, gid=0, groups=(0, 44))
    assert "keep" not in line
    assert " --group-add 44 --user 0:0 " in line
    assert " --interactive " not in command("docker")
    assert " --interactive " in command("docker", has_stdin=True)


def test_apptainer_is_given_mounts_and_the_folder_and_takes_the_environment_of_the_host() -> None:
    assert command("apptainer", devices=("--nv",)) == (
        "apptainer --quiet exec --nv --mount type=bind,source=/home/anne/work,destination=/home/anne/work"
        " --mount 'type=bind,\"source=/data/a,b\",destination=/data,ro' --pwd /home/anne/work --network=host"
        " lab/torch:2 python train.py"
    )


def test_the_working_folder_is_not_mounted_over_a_mount_of_the_user_nor_over_the_image() -> None:
    own = replace(PROGRAM.container, mounts=(Mount(source="/x", target="/home/anne/work"),))
    assert container_command(replace(PROGRAM, container=own)).count("--mount") == 1
    assert "--mount" not in container_command(replace(PROGRAM, container=replace(own, mounts=()), cwd="/"))


@pytest.mark.parametrize("tool", ["podman", "docker"])
def test_a_container_is_removed_by_its_name(tool: str) -> None:
    name = container_name("/home/anne/.local/state/gpuyard", "17.1-ab")
    assert name != container_name("/home/ben/.local/state/gpuyard", "17.1-ab")
    assert remove_command(tool, name)[:2] == (tool, "rm")
    assert remove_command(tool, name)[-1] == name
    assert remove_command("apptainer", name) == ()
