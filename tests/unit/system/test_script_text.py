"""Which commands mention a word, in themselves or in a file that they name."""

import os
from pathlib import Path

import pytest

from gpuyard.system.command_mentions import mentions

WORD = "GPUYARD_OOM_COUNT"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pkg").mkdir()
    for name in ("reads.py", "pkg/module.py", "tool"):
        (tmp_path / name).write_text(f"import os\nos.environ['{WORD}']\n")
    (tmp_path / "tool").chmod(0o755)
    (tmp_path / "other.py").write_text("print(1)\n")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (("sh", "-c", f"echo ${WORD}"), True), (("sh", "-c", "echo"), False),
        (("/bin/sh", "-c", "python reads.py > out.txt"), True),
        (("/bin/sh", "-c", "python other.py; (cd . && python -m pkg.module)"), True),
        (("/bin/sh", "-c", "echo it's; python reads.py"), True),
        (("/bin/sh", "-c", "python other.py > out.txt"), False),
        (("sh", "-c", "cd pkg && python module.py --fast"), True),
        (("sh", "-c", "cd -- pkg; python module.py"), True),
        (("sh", "-c", "python module.py; cat other.py"), False),
        (("sh", "-c", "set -e\ncd pkg\npython module.py"), True),
        (("sh", "-c", "mkdir -p out && cd pkg && cd ../pkg && python module.py"), True),
        (("sh", "-c", "cd $WHERE && python other.py"), None), (("sh", "-c", "cd - && python other.py"), None),
        (("sh", "-c", "cd missing && python other.py"), False), (("python", "reads.py"), True),
        (("./reads.py", "--fast"), True), (("accelerate", "launch", "--config_file", "c.yaml", "reads.py"), True),
        (("python", "other.py"), False), (("python", "-m", "pkg.module"), True),
        (("python", "pipe", "other.py"), False), (("tool",), True),
        (("python", "a\0b", "x" * 300, "other.py"), False), ((), None), (("not-here", "neither.py"), None),
    ],
)  # fmt: skip
def test_words_and_files_of_a_command_are_searched(folder: Path, command: tuple[str, ...], found: bool | None) -> None:
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    assert mentions(WORD, command, str(folder), path) is found


def test_only_the_beginning_of_files_of_the_working_folder_is_read(folder: Path) -> None:
    assert mentions(WORD, ("python", "reads.py"), str(folder)) is True
    assert mentions(WORD, ("python", "other.py"), str(folder)) is False
    assert mentions(WORD, ("python", "/opt/in-the-image/train.py"), str(folder)) is None
    with (folder / "large.bin").open("w") as file:
        file.truncate(1 << 30)
        file.seek(0, os.SEEK_END)
        file.write(WORD)
    assert mentions(WORD, ("python", "large.bin"), str(folder)) is False
