import sys

from gpuyard.daemon.main import run_daemon

sys.exit(run_daemon())
