import gc
import signal
import sys

# The shell that starts us makes programs in the background ignore these, and our jobs would ignore them, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
# Until the daemon serves: what it imports and makes first is there to stay.
gc.disable()

from gpuyard.daemon.main import run_daemon  # noqa: E402

sys.exit(run_daemon())
