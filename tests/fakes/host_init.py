"""The first process of an imitated machine: `python host_init.py FOLDER DISK HOME BINDFS-OPTION...`

It runs in namespaces of its own (mounts, host name, processes). FOLDER holds `machine-id`, `boot-id` and `var-tmp`,
which take the places of the real ones. The shared disk DISK is mounted at HOME as a file system of this machine alone,
as a network disk is: a socket that another machine made there refuses connections.
"""

import os
import subprocess
import sys
import time

folder, disk, home, *options = sys.argv[1:]
for source, target in (
    ("machine-id", "/etc/machine-id"),
    ("boot-id", "/proc/sys/kernel/random/boot_id"),
    ("var-tmp", "/var/tmp"),
):
    if os.path.exists(f"{folder}/{source}"):
        subprocess.run(["mount", "--bind", f"{folder}/{source}", target], check=True)
subprocess.Popen(["bindfs", "-f", "--no-allow-other", *options, disk, home])
while not os.path.ismount(home):
    time.sleep(0.01)
print("ready", flush=True)  # noqa: T201 - the test waits for it
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
