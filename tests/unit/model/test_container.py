"""Containers as they are submitted, and commands that start one themselves."""

import pytest

from gpuyard.errors import UserError
from gpuyard.model.container import (
    Container,
    Mount,
    bare_container_tool,
    parse_container,
    parse_mount,
    variables_to_pass,
    without_values,
)


@pytest.mark.parametrize(
    ("text", "mount"),
    [
        ("/data", Mount(source="/data", target="/data")),
        ("/data:ro", Mount(source="/data", target="/data", is_read_only=True)),
        ("/data:/sets", Mount(source="/data", target="/sets")),
        ("/data:/sets:rw", Mount(source="/data", target="/sets")),
        ("sets/../x:/sets:ro", Mount(source="/work/x", target="/sets", is_read_only=True)),
    ],
)
def test_a_mount_names_a_source_a_target_and_a_mode(text: str, mount: Mount) -> None:
    assert parse_mount(text, "/work") == mount


@pytest.mark.parametrize("text", ["", ":/data", "/a:b", "/a:/b:no", "/a:/b:ro:x", "~/data", "/a:/", "/a\n:/b"])
def test_a_mount_that_is_not_one_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--mount"):
        parse_mount(text, "/work")


@pytest.mark.parametrize("image", ["", "--privileged", "two words", "a\x1bb"])
def test_an_image_that_could_be_an_option_is_refused(image: str) -> None:
    with pytest.raises(UserError, match="is not an image"):
        parse_container(image, (), (), (), "/")


def test_mounts_need_an_image_and_targets_are_given_once() -> None:
    assert parse_container(None, (), (), (), "/") is None
    with pytest.raises(UserError, match="--mount is for a job in a container"):
        parse_container(None, ["/data"], (), (), "/")
    with pytest.raises(UserError, match="/x in the container is given twice"):
        parse_container("image", ["/a:/x", "/b:/x"], (), (), "/")
    # Variables of the hosts software do not enter a container.
    names = [
        "PATH", "LD_LIBRARY_PATH", "CONDA_PREFIX", "BASH_FUNC_x%%", "WANDB_API_KEY", "HOME",
        "CUDA_VISIBLE_DEVICES",
    ]  # fmt: skip
    assert variables_to_pass(names) == ["CUDA_VISIBLE_DEVICES", "HOME", "WANDB_API_KEY"]


@pytest.mark.parametrize("name", ["HOME", "PATH", "LD_PRELOAD", "DOCKER_HOST", "XDG_RUNTIME_DIR"])
def test_a_variable_of_the_tool_itself_cannot_be_set(name: str) -> None:
    with pytest.raises(UserError, match=f"--env {name}"):
        parse_container("image", (), (), [name], "/")


@pytest.mark.parametrize(
    ("command", "tool"),
    [
        (("docker", "run", "--gpus", "all", "image"), "docker"),
        (("/usr/bin/podman", "--log-level", "error", "run", "image"), "podman"),
        (("sudo", "docker", "container", "run", "image"), "docker"),
        (("/bin/sh", "-c", "cd x && docker --context=lab run image"), "docker"),
        (("docker-compose", "up"), "docker-compose"),
        (("docker", "compose", "up"), "docker"),
        (("nerdctl", "exec", "box", "python"), "nerdctl"),
        (("docker", "pull", "image"), None),
        (("python", "docker/run.py"), None),
        (("python", "train.py", "--name", "podman-run"), None),
        (("apptainer", "exec", "image.sif", "python"), None),
    ],
)
def test_a_command_that_starts_a_container_is_recognised(command: tuple[str, ...], tool: str | None) -> None:
    assert bare_container_tool(command) == tool


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (("--env=KEY=s3cret",), ("--env=KEY=…",)),
        (("--env", "KEY=s3cret", "A=b"), ("--env", "KEY=…", "A=b")),
        (("-e", "KEY=s3=cret\t"), ("-e", "KEY=…")),
        (("-eKEY=s3cret", "-e=KEY=s3cret", "--env KEY=s3cret"), ("-eKEY=…", "-e=KEY=…", "--env KEY=…")),
        (("--env=KEY", "--env", "KEY", "--network=host"), ("--env=KEY", "--env", "KEY", "--network=host")),
        (("--env-file=/run/keys", "--env="), ("--env-file=/run/keys", "--env=")),
        (("--env=spring.key=s3cret", "-e", "API-KEY=s3cret"), ("--env=spring.key=…", "-e", "API-KEY=…")),
        (("-itde=KEY=s3cret", "-ie", "KEY=s3cret"), ("-itde=KEY=…", "-ie", "KEY=…")),
    ],
)
def test_values_of_variables_in_options_are_not_shown(given: tuple[str, ...], shown: tuple[str, ...]) -> None:
    assert without_values(Container(image="image", options=given)).options == shown
