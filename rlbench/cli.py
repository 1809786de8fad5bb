"""The command line: `rlbench setup`, `train`, `options`, `ps`, `logs`, `stop`, `kill`.

Only the standard library is imported until a command needs more, so that `rlbench setup` runs where nothing
else of rlbench can be imported yet. A command is a function of the parsed arguments that returns the exit
status.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rlbench._version import __version__
from rlbench.errors import RLBenchError
from rlbench.units import format_age, format_bytes

PS_LIMIT_S = 2.0


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
    from rlbench.setup.install import install
    from rlbench.setup.plan import choose_engine

    install(choose_engine(args.engine), dry_run=args.dry_run)
    return 0


def run_ps(args: argparse.Namespace) -> int:
    """List the sessions that run on this machine."""
    from concurrent.futures import ThreadPoolExecutor

    from rlbench.runtime import registry

    records = [record for record in map(registry.read_json, registry.session_files()) if record is not None]
    with ThreadPoolExecutor(max(1, min(16, len(records)))) as pool:
        rows = list(pool.map(session_row, records))
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        print(format_table([shown_row(row) for row in rows], empty="no session is running"))
    return 0


def session_row(record: Mapping[str, Any]) -> dict[str, Any]:
    """One session as its monitor sees it; `state` is `live`, `silent` (no answer) or `gone` (only its file is left)."""
    from rlbench.monitor import client
    from rlbench.runtime import registry

    row: dict[str, Any] = {"name": record.get("name"), "state": "live", "pid": record.get("pid")}
    try:
        said = client.ask(record, "/state?history=0", limit_s=PS_LIMIT_S)
    except client.MonitorGone:
        return row | {"state": "silent" if registry.monitor_lives(record) else "gone"}
    workers = [worker for engine in said["engines"] for worker in engine["workers"]]
    return row | {
        "model": said["model"],
        "step": said["step"],
        "version": said["version"],
        "paused": said["paused"],
        "running": [call["what"] for call in said["running"]],
        "driver": said["driver"],
        "memory": sum(worker["resident"] or 0 for worker in workers),
        "lease_left_s": said["lease"]["left_s"],
    }


def shown_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `ps` for people."""
    if row["state"] != "live":
        return {"name": row["name"], "model": f"({row['state']}: rlbench kill {row['name']})"}
    driver, left = row["driver"], row["lease_left_s"]
    running = ", ".join(row["running"]) or "idle"
    return {
        "name": row["name"],
        "model": row["model"],
        "step": row["step"],
        "running": f"{running} (paused)" if row["paused"] else running,
        "driver": f"{driver['mode']} {driver['pid']}" if driver and driver["alive"] else "none",
        "memory": format_bytes(row["memory"]),
        "ends in": "-" if left is None else format_age(left),
    }


def run_logs(args: argparse.Namespace) -> int:
    """Print the last lines that the workers of a session wrote."""
    from rlbench.monitor import client, logs

    record = client.find(args.name)
    for worker, pid in logs.chosen(record, args.worker).items():
        for path in logs.files_of(record, pid):
            lines = list(logs.last_lines(path, args.lines))
            if lines:
                print(f"== {worker} (pid {pid}) {path.suffix.removeprefix('.')}", *lines, sep="\n")
    return 0


def run_stop(args: argparse.Namespace) -> int:
    """Stop what runs in a session, which stays with its weights. Without a name: end the cluster rlbench started on
    this machine; with sessions on it only when told so by --all.
    """
    return run_stop_session(args.name) if args.name else run_stop_cluster(args.all)


def run_stop_session(name: str) -> int:
    """Stop what runs in a session."""
    from rlbench.monitor import client

    stopped = client.command(client.find(name), "stop", limit_s=30.0)["result"]["stopped"]
    print(f"stopping {', '.join(stopped)}" if stopped else "nothing runs")
    return 0


def run_stop_cluster(also_with_sessions: bool) -> int:
    """End the cluster."""
    from rlbench.runtime import cluster, registry

    record = registry.read_cluster()
    if record is None or not cluster.guard_alive(record):
        print("no cluster of ours is running")
        return 0
    held = [str(row.get("name")) for row in registry.live_sessions(record.id)]
    if held and not also_with_sessions:
        print(
            f"rlbench stop: the cluster holds the sessions {', '.join(held)} with their weights: close them "
            "with `rlbench kill NAME`, or end all with `rlbench stop --all`",
            file=sys.stderr,
        )
        return 1
    cluster.stop_cluster(record)
    print("the cluster was stopped")
    return 0


def run_kill(args: argparse.Namespace) -> int:
    """End a session with its weights, also one whose monitor is gone."""
    from rlbench.monitor import client, ending

    client.find(args.name)
    if not args.yes and not _confirmed(f"end session {args.name} with its weights? [y/N] "):
        print("nothing was ended; --yes ends it without asking", file=sys.stderr)
        return 1
    print(f"{args.name}: {ending.end(args.name)}")
    return 0


def run_train(args: argparse.Namespace) -> int:
    """Train a policy in a session of its own: METHOD [FILE.yaml] [--option value …]; `train --help` has all options."""
    from rlbench.session.command.train_command import train

    return train(args.arguments)


def run_options(args: argparse.Namespace) -> int:
    """Print every option with its default, what it does and its other names, as Markdown; docs/options.md is that."""
    from rlbench.session.command.options_page import page

    print(page(), end="")
    return 0


def _confirmed(question: str) -> bool:
    """Ask a person; where nobody can be asked the answer is no."""
    return sys.stdin.isatty() and input(question).strip().lower() in ("y", "yes")


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

    train = commands.add_parser(
        "train", help="train a policy: METHOD [FILE.yaml] [--option value …]", add_help=False, prefix_chars="\0"
    )  # nothing begins with that: all that follows, --help too, is left to the command's own parser
    train.add_argument("arguments", nargs=argparse.REMAINDER)
    train.set_defaults(run=run_train)

    options = commands.add_parser("options", help="what every option does", description=run_options.__doc__)
    options.set_defaults(run=run_options)

    ps = commands.add_parser("ps", help="list the running sessions", description=run_ps.__doc__)
    ps.add_argument("--json", action="store_true", help="as JSON, with all that is known")
    ps.set_defaults(run=run_ps)

    logs = commands.add_parser("logs", help="what the workers wrote", description=run_logs.__doc__)
    logs.add_argument("name", metavar="NAME", help="of the session")
    logs.add_argument("--worker", metavar="W", help="one of them: inference, actor/0, monitor; default: all workers")
    logs.add_argument("-n", "--lines", type=int, default=20, metavar="N", help="lines of each file (20)")
    logs.set_defaults(run=run_logs)

    stop = commands.add_parser(
        "stop", help="stop what runs in a session, or end the cluster", description=run_stop.__doc__
    )
    stop.add_argument("name", nargs="?", metavar="NAME", help="of the session; without: the cluster")
    stop.add_argument("--all", action="store_true", help="the cluster with the sessions on it and their weights")
    stop.set_defaults(run=run_stop)

    kill = commands.add_parser("kill", help="end a session with its weights", description=run_kill.__doc__)
    kill.add_argument("name", metavar="NAME", help="of the session")
    kill.add_argument("--yes", action="store_true", help="do not ask")
    kill.set_defaults(run=run_kill)
    return parser


if __name__ == "__main__":
    sys.exit(main())
