"""The files of code snapshots: `snapshots/NAME` holds `tree`, the copies, and `files`, the list of what was copied.

The list has the root of the original tree, then for each file its size, its time of change and its path. A file of the
snapshot, or of the original tree, that still has both is unchanged. It imports little, as `gpuyard submit` uses it."""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    # A path relative to the root, and the file's status.
    Listed = tuple[str, os.stat_result]
else:
    Listed = tuple

FOLDER, TREE, FILES = "snapshots", "tree", "files"
# The list of results that are in the tree already, in the same format.
BROUGHT = "brought"
# Exists while results could not be brought back: the label of the job, and why.
UNBROUGHT = "unbrought"
# The prefix of a snapshot that is not complete, and of one that is being removed. No name starts with them.
NEW, REMOVED = ".new-", ".removed-"
# Exists once the daemon has stored jobs that use the snapshot.
TAKEN = "taken"


def write_listing(path: str, root: str, files: "Iterable[Listed]") -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(listing_text(root, ((name, (found.st_size, found.st_mtime_ns)) for name, found in files)))


def listing_text(root: str, files: "Iterable[tuple[str, tuple[int, int]]]") -> bytes:
    lines = (f"{size} {changed_ns} {name}" for name, (size, changed_ns) in files)
    return "\0".join([root, *lines]).encode(errors="surrogateescape")


def read_listing(path: str) -> "tuple[str, dict[str, tuple[int, int]]]":
    """Return the root, and size and time of change of each file by its path. Raises OSError if it cannot be read."""
    with open(path, "rb") as file:
        root, *lines = file.read().decode(errors="surrogateescape").split("\0")
    files = {}
    for line in lines:
        size, changed_ns, name = line.split(" ", 2)
        files[name] = int(size), int(changed_ns)
    return root, files
