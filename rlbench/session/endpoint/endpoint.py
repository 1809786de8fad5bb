"""`session.endpoint()`: the live policy behind an OpenAI-compatible URL; `session.traces()`: what was asked there."""

from __future__ import annotations

import fnmatch
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlbench.data.runs.journal import read
from rlbench.data.runs.traces import Traces
from rlbench.engines.under import adapter_number
from rlbench.envs.policy import Policy
from rlbench.errors import SessionError, StateError, Suggesting
from rlbench.notebook.cards.card import WARNING, Card, Grid
from rlbench.runtime import registry
from rlbench.session.core import SessionCore
from rlbench.traces import user_stacklevel
from rlbench.weights import facts
from rlbench.workers.replica.serving.options import ServeOptions, replica_of

LOOPBACK = ("127.0.0.1", "localhost")
POLICY = "policy"
SERVED = "served.json"


@dataclass(frozen=True, eq=False)
class Endpoint(Suggesting):
    """Where agents reach the live policy. `url` is the base URL for clients, `key` their API key, `models` what they
    may ask for; `urls` are those of all replicas, each of which takes all calls and hands on what another serves."""

    core: SessionCore = field(repr=False)
    urls: tuple[str, ...]
    key: str = field(repr=False)
    models: tuple[str, ...]

    @property
    def url(self) -> str:
        """Base URL of all calls; those that name no run belong to the conversation that they continue."""
        return f"{self.urls[0]}/v1"

    def run(self, name: str) -> str:
        """Base URL of a run: all calls made there belong together, and are served by one replica."""
        return f"{self.urls[replica_of(name, len(self.urls))]}/run/{name}/v1"

    @property
    def counts(self) -> dict[str, int]:
        """Calls that are open now and that are over, and tokens sampled in those, over all replicas."""
        return _counts(self.core.inference.control("endpoint"))

    @property
    def curl(self) -> str:
        """A line for a shell that asks it."""
        return (
            f"curl {self.url}/chat/completions -H 'Authorization: Bearer {self.key}' -H 'Content-Type: "
            f'application/json\' -d \'{{"model": "{POLICY}", "messages": [{{"role": "user", "content": "Hi"}}]}}\''
        )

    @property
    def python(self) -> str:
        """A line of Python that makes a client of it."""
        return f"client = openai.OpenAI(base_url={self.url!r}, api_key={self.key!r})"

    def close(self) -> None:
        """Answer nobody any more; the traces stay."""
        (_folder(self.core) / SERVED).unlink(missing_ok=True)
        self.core.inference.call_all("unserve").result()

    def look(self) -> tuple[Card, bool]:
        """Return what a cell shows of it, and whether it is closed; a notebook looks again while the card stands."""
        served = self.core.inference.control("endpoint")
        closed = any(one is None for one in served)
        held = any(one is not None and one["held"] for one in served)
        notes = [f"{WARNING}closed: session.endpoint() opens it again"] if closed else []
        notes += [f"{WARNING}calls wait: generation is paused, or the replicas' memory is released"] if held else []
        rows = [("url", self.url), ("key", self.key), ("models", ", ".join(self.models))]
        rows += [("python", self.python), ("curl", self.curl)]
        counts = [f"{value:,} {name}" for name, value in _counts(served).items()]
        return Card("Endpoint", counts, [Grid(rows, labels=True)], notes), closed

    def __repr__(self) -> str:
        return self.look()[0].text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return self.look()[0].bundle()


def endpoint(
    core: SessionCore,
    *,
    host: str | None = None,
    port: int | None = None,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    template: Mapping[str, Any] | None = None,
    fetch_images: bool | None = None,
    across_syncs: bool | None = None,
) -> Endpoint:
    """Serve the live policy to any OpenAI client, beside and between verbs; returns its card: URL, key, counts.

        client = openai.OpenAI(base_url=session.endpoint().run("a"), api_key=session.endpoint().key)

    Called again it returns the one there is, or opens it again where it was, changed as far as options are given. A
    weight sync lets calls under way come to their end first, unless they go on `across_syncs`; while the replicas
    cannot compute, calls wait. Every call is kept: `traces()`.

    Args:
        host: address to listen on, by default 127.0.0.1. Another than this machine's own lets others in who know the
            key, unencrypted.
        port: None takes a free one; further replicas take those behind it.
        tool_parser, reasoning_parser: vLLM's, by the model's format of tool calls and thinking: `"hermes"`, `"qwen3"`.
        template: options of the chat template: `{"enable_thinking": False}`.
        fetch_images: read images at http addresses that clients name, from this machine; else data URLs alone.
        across_syncs: no sync waits for calls of the policy that are under way: they go on with the weights that come,
            and their tokens have the version of those they were sampled from (the channel `weight_version`).
    """
    models = _models(core)
    given = {
        "host": host,
        "port": port,
        "tool_parser": tool_parser,
        "reasoning_parser": reasoning_parser,
        "template": None if template is None else dict(template),
        "fetch_images": fetch_images,
        "across_syncs": across_syncs,
    }
    known = registry.read_json(_folder(core) / SERVED) or {}
    asked = {"host": "127.0.0.1", "port": 0, "tool_parser": None, "reasoning_parser": None, "template": {}}
    asked |= {"fetch_images": False, "across_syncs": False}
    asked |= known.get("asked", {}) | {name: value for name, value in given.items() if value is not None}
    asked["models"] = models
    counts = core.inference.control("endpoint")
    if known.get("asked") != asked or len(known["ports"]) != len(counts) or any(one is None for one in counts):
        known = _served(core, asked, known)
    return Endpoint(core, _urls(str(asked["host"]), known["ports"]), known["key"], tuple(models))


def policy(core: SessionCore, adapter: str | None = None) -> Policy:
    """Give the live policy as a value that can be sent: an environment asks it during an episode.

        old = session.policy("old")      # what `session.branch("old")` left in the replicas
        class Duel(rb.envs.Env):
            def step(self, turn): return rb.envs.Step(reward=won(turn.text, old.answer(turn.prompt.content)), done=True)

    It is asked at the session's endpoint, which is opened for it: `old.answer(chat, max_tokens=8, temperature=1.0)`.
    It follows the weights that are synced, unless it is an adapter that was left.

    Args:
        adapter: of which branch; "base": none (both with `rb.Inference(adapters=2)`); None: the policy synced last.
    """
    adapter_number(core.inference, adapter)
    opened = endpoint(core)
    return Policy(core.name, adapter or POLICY, opened.urls, opened.key)


def traces(core: SessionCore, runs: str | Sequence[str] | None = None) -> Traces:
    """What agents did at the endpoint, by run: `traces.batch(advantage=…)`, `traces.score(…)`, `traces.rollouts`.

    Args:
        runs: names, or a pattern of names (`"task-3.*"`); None: all. A conversation without a named run is `~1`, `~2`…,
            of the second replica `~1.1`, `~1.2`….
    """
    names = [runs] if isinstance(runs, str) else runs
    return kept(core, lambda name: names is None or any(fnmatch.fnmatchcase(name, one) for one in names))


def kept(core: SessionCore, wanted: Callable[[str], bool], begins: Mapping[str, int] | None = None) -> Traces:
    """Return the runs whose name is `wanted`; `begins`: by file, see `ends`, what to leave out of it."""
    paths = sorted(_folder(core).glob("*.jsonl"))
    calls = [call for path in paths for call in read(path, (begins or {}).get(path.name, 0)) if wanted(call.run)]
    engine = core.inference
    return Traces.of(calls, engine.decoded, engine.tokenizer, engine)


def ends(core: SessionCore) -> dict[str, int]:
    """Return how many bytes each file of calls has so far, by its name."""
    return {path.name: path.stat().st_size for path in _folder(core).glob("*.jsonl")}


def _served(core: SessionCore, asked: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Have all replicas serve, where they were before if that was asked for; return what is kept of it."""
    if asked["host"] not in LOOPBACK:
        warnings.warn(
            f"the endpoint listens on {asked['host']}: whoever reaches that address and has the key samples from the "
            "policy, and what is said goes over the network unencrypted (docs/security.md)",
            stacklevel=user_stacklevel(),
        )
    here = facts.node()
    if any(one.node != here for one in core.inference.control("sync_facts")):
        raise SessionError(
            "endpoint: a replica is on another node; an endpoint serves replicas of the kernel's machine"
        )
    count = len(core.inference.workers)
    before = [] if asked["port"] else known.get("ports", [])[:count]
    ports = [*before, *_ports(asked["port"], count)[len(before) :]]
    key = known.get("key") or secrets.token_urlsafe(32)
    _folder(core).mkdir(mode=0o700, parents=True, exist_ok=True)

    def serve(ports: Sequence[int]) -> list[int]:
        options = {name: value for name, value in asked.items() if name != "port"}
        files = [str(_folder(core) / f"{index}.jsonl") for index in range(count)]
        each = [
            ServeOptions(journal=file, key=key, port=port, **options) for file, port in zip(files, ports, strict=True)
        ]
        return [int(port) for port in core.inference.call("serve", [((one,), {}) for one in each]).result()]

    try:
        served = serve(ports)
    except StateError:
        if asked["port"] or ports == [0] * count:
            raise
        served = serve([0] * count)  # somebody else has the ports by now
    if count > 1:
        urls = _urls(str(asked["host"]), served)
        core.inference.call("balance", [((own, urls), {}) for own in range(count)]).result()
    kept = {"asked": dict(asked), "key": key, "ports": served}
    registry.write_json(_folder(core) / SERVED, kept)
    return kept


def _counts(served: Sequence[Mapping[str, Any] | None]) -> dict[str, int]:
    return {name: sum(int(one[name]) for one in served if one is not None) for name in ("open", "calls", "tokens")}


def _urls(host: str, ports: Sequence[int]) -> tuple[str, ...]:
    shown = "127.0.0.1" if host in ("0.0.0.0", "localhost") else host
    return tuple(f"http://{shown}:{port}" for port in ports)


def _ports(first: int, count: int) -> list[int]:
    return [first + index if first else 0 for index in range(count)]


def _models(core: SessionCore) -> dict[str, int | None]:
    """Return the adapter of each model that clients may ask for, by name: see `ServeOptions`."""
    name = Path(core.options.model).name if Path(core.options.model).is_dir() else core.options.model
    adapters = {"base": 0} | core.adapters if core.inference.info.get("adapters") else {}
    return {POLICY: None, name: None} | adapters


def _folder(core: SessionCore) -> Path:
    return registry.snapshot_folder(core.name) / "endpoint"
