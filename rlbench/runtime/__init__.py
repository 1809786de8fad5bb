"""The Ray cluster: start, find, attach, stop; devices, ports, tokens."""

from rlbench.runtime.cluster import Cluster, current, init, shutdown
from rlbench.runtime.registry import live_sessions as sessions

__all__ = ["Cluster", "current", "init", "sessions", "shutdown"]
