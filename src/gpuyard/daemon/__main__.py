import gc
import sys

# Until the daemon serves: what it imports and makes first is there to stay.
gc.disable()

from gpuyard.daemon.main import run_daemon  # noqa: E402

sys.exit(run_daemon())
