"""Git work trees of tests."""

import subprocess
from pathlib import Path


def git(tree: Path, *arguments: str) -> str:
    """Run git in a work tree, and return what it prints."""
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "protocol.file.allow=always"]
    return subprocess.run([*command, *arguments], cwd=tree, check=True, capture_output=True, text=True).stdout.strip()


def make_work_tree(root: Path, files: dict[str, str]) -> Path:
    """Make a work tree in which these files are committed."""
    root.mkdir()
    git(root, "init", "--quiet")
    for name, content in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(content)
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "first")
    return root
