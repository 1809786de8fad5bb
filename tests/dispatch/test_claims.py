"""Shared work of two calls: each hands out every index once, whatever the order replicas run them in."""

import threading

import pytest

pytestmark = pytest.mark.engine


def test_two_calls_that_interleave_each_hand_out_every_index_once(cluster):
    from rlbench.dispatch.host import KEPT_QUEUES, Host  # after the cluster: it imports ray

    host = object.__new__(Host)
    host._lock, host._queues = threading.Lock(), {}
    assert Host.claim(host, "ranks", 4, 2) == [0, 1]
    assert Host.claim(host, "kernel", 3, 2) == [0, 1]
    assert Host.claim(host, "ranks", 4, 9) == [2, 3] and Host.claim(host, "kernel", 3, 9) == [2]
    for number in range(3 * KEPT_QUEUES):
        Host.claim(host, f"later {number}", 1, 1)
    assert len(host._queues) == KEPT_QUEUES
