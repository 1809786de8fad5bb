"""The replica's part that serves clients: the server, and what steps the engine for them where no call does."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlbench.dispatch.context import current
from rlbench.errors import Stopped
from rlbench.workers.replica import vllm_setup
from rlbench.workers.replica.guests import LOOK_S
from rlbench.workers.replica.serving.options import ServeOptions

if TYPE_CHECKING:
    from rlbench.workers.replica.serving.app import Server
    from rlbench.workers.replica.vllm import VllmReplica


class ReplicaEndpoint:
    """Serves the requests of `replica.guests`."""

    def __init__(self, replica: VllmReplica) -> None:
        self._replica = replica
        self._server: Server | None = None

    def serve(self, options: ServeOptions) -> int:
        """Begin, in place of what was served before; return the port."""
        from rlbench.workers.replica.serving.app import Server, check_parsers
        from rlbench.workers.replica.serving.client import EngineClient

        check_parsers(options)
        self.close()
        replica = self._replica

        def version_of(adapter: int | None) -> int:
            return replica.version_of(replica.adapter if adapter is None else adapter)

        client = EngineClient(replica.built, replica.guests, Path(options.journal), options.models, version_of)
        self._server = Server(client, options, replica.config.path, self._begin, self._step)
        return self._server.port

    def balance(self, own: int, urls: Sequence[str]) -> None:
        """Share what arrives with the replicas at these addresses, of which this one is number `own`."""
        if self._server is not None:
            self._server.balance(own, urls)

    def close(self) -> None:
        """End it; requests under way leave the engine."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            with self._replica.turn.of_call():
                self._replica.guests.expel(self._replica.built)

    def counts(self) -> dict[str, Any] | None:
        """Return what is served in numbers; None where nothing is."""
        server = self._server
        if server is None:
            return None
        return {**server.client.counts, "port": server.port, "held": not self._can()}

    def _can(self) -> bool:
        return self._replica.state.ready and not self._replica.gate.closed

    def _begin(self) -> None:
        """Compute with as many threads as calls do: half-way through a pass torch would give this thread its own."""
        vllm_setup.use_threads(vllm_setup.thread_count(self._replica.config))

    def _step(self) -> None:
        """Take one step for clients; nothing while a call has the engine, or the replica cannot compute."""
        replica = self._replica
        if not replica.guests.awaited():
            return
        if not self._can():
            time.sleep(LOOK_S)
            return
        with replica.turn.between_calls():
            if not self._can():
                return
            try:
                with replica.requests(admit=replica.adapter) as requests:
                    for known_as, _ in requests.step():
                        raise AssertionError(f"{known_as} is in the engine between two calls")
            except Exception as error:  # vLLM's, whatever it is: those who wait are told, and the log
                traceback.print_exc(file=sys.stderr)
                replica.guests.fail(error)

    def end_guests(self) -> None:
        """Let requests that are in the engine come to their end, before what they stand on changes; new ones wait."""
        self._end(lambda: self._replica.guests.inside)

    def make_way(self, adapter: int) -> None:
        """Before weights come, of an adapter alone or (0) whole ones: let requests in the engine come to their end, or
        where the policy's may go on across a sync, only those that name the adapter, as of these one version is told.
        """
        replica, server = self._replica, self._server
        if server is None or not server.options.across_syncs or adapter != replica.adapter:
            self.end_guests()
        elif adapter:
            self._end(lambda: replica.guests.naming(adapter))

    def _end(self, count: Callable[[], int]) -> None:
        replica = self._replica
        if not count() or replica.state.weights != "cuda" or replica.state.kv_cache != "cuda":
            return
        with replica.requests() as requests:
            while count() and not current().stop_requested():
                replica.guests.expel(replica.built)
                for known_as, _ in requests.step():
                    raise AssertionError(f"{known_as} is in the engine between two calls")
        if count():
            raise Stopped("stopped while clients of the endpoint were served to their end; nothing has changed")
