"""Free ports on loopback, for servers that cannot choose a port themselves."""

import contextlib
import random
import socket

# Below the range of outgoing connections, which could take a port before its server listens on it.
_RANGE = range(20_000, 32_000)


def free_ports(count: int) -> list[int]:
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in random.sample(_RANGE, len(_RANGE)):
            with contextlib.suppress(OSError):  # in use
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                ports.append(port)
            if len(ports) == count:
                return ports
    raise OSError(f"fewer than {count} ports are free")
