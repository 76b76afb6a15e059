"""Find a port for the processes of a benchmark."""

import socket

__all__ = ["free_port"]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
