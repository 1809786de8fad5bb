"""The socket of an endpoint: whoever knows its port is heard, also before the server runs."""

import socket

import pytest

from rlbench.errors import StateError
from rlbench.workers.replica.serving.listening import listening


def test_a_client_that_calls_before_the_server_runs_waits_and_is_not_refused() -> None:
    with listening("127.0.0.1", 0) as server, socket.create_connection(server.getsockname(), timeout=60) as client:
        client.sendall(b"GET")
        taken, _ = server.accept()
        with taken:
            assert taken.recv(3) == b"GET"


def test_a_port_that_somebody_has_and_an_address_that_is_none_are_said() -> None:
    with listening("127.0.0.1", 0) as server:
        port = server.getsockname()[1]
        with pytest.raises(StateError, match=rf"cannot listen on 127\.0\.0\.1:{port}"):
            listening("127.0.0.1", port)
    with pytest.raises(StateError, match=r"cannot listen on 192\.0\.2\.1:0"):
        listening("192.0.2.1", 0)
