"""The checkout as a package: a git submodule of a project, named `gpu_scheduler` or `gpuyard`, at the project's root.

`from gpu_scheduler import GPUScheduler` then works from that root without an installation: the package in `src` takes
the place of this one. Nothing else imports this file; docs/how-to/use-in-another-project.md is for users.
"""

import importlib
import os
import sys

if __name__ in {"gpu_scheduler", "gpuyard"}:
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "src"))
    del sys.modules[__name__]
    importlib.import_module(__name__)
