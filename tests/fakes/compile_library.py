"""Compile a C file of the tests as a shared library: a fake of a vendor's, or one that is preloaded."""

import subprocess
from pathlib import Path


def compile_library(source: Path, library: Path, *options: str) -> Path:
    """Return the library. Warnings are errors."""
    common = ("-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror")
    subprocess.run(["cc", *common, "-o", str(library), str(source), *options], check=True)
    return library
