"""What the start of the daemon must not import: a submission may wait for it."""

import subprocess
import sys

LATE = {"tomllib", "gpuyard.engines.session.runner", "gpuyard.engines.cluster.engine"}


def test_the_daemon_imports_what_it_needs_rarely_after_its_start() -> None:
    check = f"import sys, gpuyard.daemon.main; print(sorted({LATE!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
