"""The command line: `rlbench setup`, `rlbench ps`, `rlbench stop`.

Only the standard library is imported until a command needs more, so that `rlbench setup` runs where nothing
else of rlbench can be imported yet. A command is a function of the parsed arguments that returns the exit
status.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rlbench._version import __version__
from rlbench.errors import RLBenchError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; usage errors end the process with 2, as argparse does."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except RLBenchError as error:
        print(f"rlbench {args.command}: {error}", file=sys.stderr)
        return 1
    return status


def run_setup(args: argparse.Namespace) -> int:
    """Install the engine set that fits this machine into the environment rlbench runs in."""
    from importlib.metadata import requires
    from pathlib import Path

    from rlbench.setup import plan
    from rlbench.setup.install import install

    plan.check_this_machine()
    engine = plan.choose_engine(args.engine or os.environ.get("RLBENCH_ENGINE"), plan.has_nvidia_gpu())
    install(plan.plan_user(engine, requires("rlbench") or ()), Path(sys.executable), dry_run=args.dry_run)
    return 0


def run_ps(args: argparse.Namespace) -> int:
    """List the sessions that run on this machine."""
    from rlbench import runtime

    # a session's record holds the token of its endpoint, which is nobody's business on a screen
    shown = [{key: value for key, value in row.items() if "token" not in key} for row in runtime.sessions()]
    print(format_table(shown, empty="no session is running"))
    return 0


def run_stop(args: argparse.Namespace) -> int:
    """End the cluster rlbench started on this machine; with sessions on it only when told so by --all."""
    from rlbench.runtime import cluster, registry

    record = registry.read_cluster()
    if record is None or not cluster.guard_alive(record):
        print("no cluster of ours is running")
        return 0
    held = [str(row.get("name")) for row in registry.live_sessions(record.id)]
    if held and not args.all:
        print(
            f"rlbench stop: the cluster holds the sessions {', '.join(held)} with their weights: close them "
            "with rb.attach(name).close(), or end all with `rlbench stop --all`",
            file=sys.stderr,
        )
        return 1
    cluster.stop_cluster(record)
    print("the cluster was stopped")
    return 0


def format_table(rows: Sequence[Mapping[str, Any]], empty: str) -> str:
    """Rows as aligned text columns, one for each key that occurs, `-` where a row lacks it."""
    if not rows:
        return empty
    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = [keys, *(["-" if row.get(key) is None else str(row[key]) for key in keys] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlbench", description="A workbench for reinforcement learning of language models."
    )
    parser.add_argument("--version", action="version", version=f"rlbench {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    setup = commands.add_parser(
        "setup", help="install the engine that fits this machine", description=run_setup.__doc__
    )
    setup.add_argument("--engine", choices=("cpu", "gpu"), help="instead of what the machine has")
    setup.add_argument("--dry-run", action="store_true", help="print the uv commands, install nothing")
    setup.set_defaults(run=run_setup)

    ps = commands.add_parser("ps", help="list the running sessions", description=run_ps.__doc__)
    ps.set_defaults(run=run_ps)

    stop = commands.add_parser("stop", help="end the cluster and its sessions", description=run_stop.__doc__)
    stop.add_argument("--all", action="store_true", help="with the sessions on it and their weights")
    stop.set_defaults(run=run_stop)
    return parser


if __name__ == "__main__":
    sys.exit(main())
