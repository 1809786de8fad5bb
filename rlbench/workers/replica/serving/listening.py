"""The socket that the endpoint's server takes over."""

from __future__ import annotations

import socket

from rlbench.errors import StateError

CONNECTIONS = 1024
"""How many the server holds at a time, and how many wait before it runs."""


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that takes connections from now on: who calls before the server's thread runs waits for it.

    Raises:
        StateError: nobody can listen there.
    """
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
        made.listen(CONNECTIONS)
    except OSError as error:
        made.close()
        raise StateError(f"the endpoint cannot listen on {host}:{port}: {error}") from error
    return made
