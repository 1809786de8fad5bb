"""The command line: `rlbench setup`, `plan`, `train`, `options`, `ps`, `logs`, `stop`, `park`, `kill`.

A command is a function of the parsed arguments that returns the exit status. Only the standard library is imported
until one needs more, so that `rlbench setup` runs where nothing else of rlbench can be imported yet.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlbench._version import __version__
from rlbench.errors import RLBenchError
from rlbench.units import format_age, format_bytes

PS_LIMIT_S, PARK_LIMIT_S = 2.0, 3600.0
UNREAD = 141
"""The status of a command that nobody reads any more: that of a program which SIGPIPE ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; usage errors end the process with 2, as argparse does."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except RLBenchError as error:
        print(f"rlbench {args.command}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        if not _is_unread(sys.stdout.fileno()):
            raise  # of another pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left to print
        return UNREAD
    return status


def _is_unread(pipe: int) -> bool:
    """Whether nobody reads a pipe any more, as behind `| head`."""
    poll = select.poll()
    poll.register(pipe, select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def run_setup(args: argparse.Namespace) -> int:
    """Install the engine set that fits this machine into the environment rlbench runs in."""
    from rlbench.setup.install import install
    from rlbench.setup.plan import choose_engine

    install(choose_engine(args.engine), dry_run=args.dry_run)
    return 0


def run_ps(args: argparse.Namespace) -> int:
    """List the sessions of this machine, those that are parked last."""
    from concurrent.futures import ThreadPoolExecutor

    from rlbench.runtime import registry

    records = registry.live_sessions()
    with ThreadPoolExecutor(max(1, min(16, len(records)))) as pool:
        rows = [*pool.map(session_row, records), *registry.parked_sessions()]
    shown = format_table([shown_row(row) for row in rows]) or "no session is running"
    print(json.dumps(rows, indent=2) if args.json else shown)
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
        **{key: said[key] for key in ("model", "step", "version", "paused", "driver")},
        "running": [call["what"] for call in said["running"]],
        "memory": sum(worker["resident"] or 0 for worker in workers),
        "lease_left_s": said["lease"]["left_s"],
    }


def shown_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `ps` for people."""
    if row["state"] == "parked":
        facts = {"name": row["name"], "model": row.get("model"), "step": row.get("step"), "running": "parked"}
        return facts | {"on disk": format_bytes(int(row.get("bytes", 0)))}
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
    from rlbench.monitor import client
    from rlbench.runtime import cluster, registry

    if args.name:
        stopped = client.command(client.find(args.name), "stop", limit_s=30.0)["result"]["stopped"]
        print(f"stopping {', '.join(stopped)}" if stopped else "nothing runs")
        return 0
    record = registry.read_cluster()
    if record is None or not cluster.guard_alive(record):
        print("no cluster of ours is running")
        return 0
    held = [str(row.get("name")) for row in registry.live_sessions(record.id)]
    if held and not args.all:
        raise RLBenchError(
            f"the cluster holds the sessions {', '.join(held)} with their weights: close them with "
            "`rlbench kill NAME`, or end all with `rlbench stop --all`"
        )
    cluster.stop_cluster(record)
    print("the cluster was stopped")
    return 0


def run_park(args: argparse.Namespace) -> int:
    """Write a session to disk, whole, and end it: its memory is free, `rb.attach(NAME)` brings it back. Without a name:
    every session whose kernel is gone.
    """
    from rlbench.monitor import client
    from rlbench.runtime import registry

    if args.drop:
        if registry.parked(args.drop) is None:
            known = ", ".join(one["name"] for one in registry.parked_sessions()) or "none"
            raise RLBenchError(f"no parked session {args.drop!r}; there are: {known}")
        _confirm(f"forget the parked session {args.drop} with its weights? [y/N] ", args.yes)
        registry.forget_parked(args.drop)
        print(f"{args.drop}: forgotten")
        return 0
    if args.list:
        print(parked_table(registry.parked_sessions()))
        return 0
    records = [client.find(args.name)] if args.name else [one for one in registry.live_sessions() if is_left(one)]
    if not records:
        print("no session without its kernel; `rlbench park NAME` parks one that has it")
    for record in records:
        given = {"drop_gradients": True} if args.drop_gradients else {}
        done = client.command(record, "park", given, limit_s=PARK_LIMIT_S)["result"]
        print(f"{record['name']}: {format_bytes(done['bytes'])} in {done['path']}")
        print("".join(f"  not kept: {one}\n" for one in done["lost"]), end="")
        print("".join(f"{one}: forgotten for its age\n" for one in done["removed"]), end="")
    return 0


def is_left(record: Mapping[str, Any]) -> bool:
    """Whether the session's driver is gone; not said of one whose monitor does not answer."""
    from rlbench.monitor import client

    try:
        said = client.ask(record, "/state?history=0", limit_s=PS_LIMIT_S)
    except client.MonitorGone:
        return False
    return not (said["driver"] or {}).get("alive", False)


def parked_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Parked sessions and what they take in all."""
    rows = [
        {
            "name": one["name"],
            "model": one.get("model"),
            "step": one.get("step"),
            "parked": f"{format_age(max(0.0, time.time() - one['time']))} ago" if "time" in one else None,
            "on disk": format_bytes(int(one.get("bytes", 0))),
        }
        for one in records
    ]
    total = format_bytes(sum(int(one.get("bytes", 0)) for one in records))
    return f"{format_table(rows)}\n{total} in all" if rows else "no session is parked"


def run_kill(args: argparse.Namespace) -> int:
    """End a session with its weights, also one whose monitor is gone."""
    from rlbench.monitor import client, ending

    client.find(args.name)
    _confirm(f"end session {args.name} with its weights? [y/N] ", args.yes)
    print(f"{args.name}: {ending.end(args.name)}")
    return 0


def _confirm(question: str, yes: bool) -> None:
    """Ask; where nobody can be asked the answer is no."""
    if not yes and not (sys.stdin.isatty() and input(question).strip().lower() in ("y", "yes")):
        raise RLBenchError("nothing was ended; --yes ends it without asking")


def run_train(args: argparse.Namespace) -> int:
    """Train a policy in a session of its own: METHOD [FILE.yaml] [--option value …]; `train --help` has all options."""
    from rlbench.session.command.train_command import train

    return train(args.arguments)


def run_plan(args: argparse.Namespace) -> int:
    """Say what memory a session of a model would take, by role, owner and phase; status 1 where it does not fit."""
    from rlbench.session.planning.plan import plan

    found = plan(
        args.model,
        train=dict(map(_option, args.train)),
        inference=dict(map(_option, args.inference)),
        reference=args.reference,
        undo=args.undo,
        gpus=args.gpus,
        lengths=args.lengths,
        token_budget=args.token_budget,
        offload=args.offload,
        images=args.images,
        critic=args.critic,
        rewards=args.reward,
        ema=args.ema,
    )
    print(found)
    return 0 if found.fits else 1


def _option(text: str) -> tuple[str, Any]:
    """`shards=2` as a name and a value; what is no number, True, False or None stays text."""
    import ast

    name, equals, value = text.partition("=")
    if not equals:
        raise RLBenchError(f"{text!r}: an option is given as name=value, as in --train shards=2")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def run_options(args: argparse.Namespace) -> int:
    """Print every option with its default, what it does and its other names, as Markdown; docs/options.md is that."""
    from rlbench.session.command.options_page import page

    print(page(), end="")
    return 0


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write rows as aligned text columns, one for each key that occurs, `-` where a row lacks it."""
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

    def command(run: Callable[[argparse.Namespace], int], help: str, **more: Any) -> argparse.ArgumentParser:
        added = commands.add_parser(run.__name__.removeprefix("run_"), help=help, description=run.__doc__, **more)
        added.set_defaults(run=run)
        return added

    setup = command(run_setup, "install the engine that fits this machine")
    setup.add_argument("--engine", choices=("cpu", "gpu"), help="instead of what the machine has")
    setup.add_argument("--dry-run", action="store_true", help="print the uv commands, install nothing")
    # nothing begins with that prefix: all that follows, --help too, is left to the command's own parser
    about = "train a policy: METHOD [FILE.yaml] [--option value …]"
    train = command(run_train, about, add_help=False, prefix_chars="\0")
    train.add_argument("arguments", nargs=argparse.REMAINDER)
    plan = command(run_plan, "the memory a session would take")
    plan.add_argument("model", metavar="MODEL", help="a folder, a hub id, or an embedded model's name")
    plan.add_argument("--gpus", metavar="2x80GiB", help="devices; 0x24GiB: a host without a GPU; default: this machine")
    plan.add_argument("--lengths", type=int, metavar="N", help="tokens of the longest sequence")
    plan.add_argument("--images", metavar="2x1280x800", help="pictures in each sequence, pixels wide and high")
    plan.add_argument("--token-budget", type=int, metavar="N", help="tokens of one micro-batch on one rank")
    plan.add_argument("--train", action="append", default=[], metavar="NAME=VALUE", help="an option of rb.Train")
    plan.add_argument("--inference", action="append", default=[], metavar="NAME=VALUE", help="one of rb.Inference")
    plan.add_argument("--reference", action="store_true", help="with the starting weights as a frozen reference")
    about = "with a trainer's critic, of the model itself or of PATH"
    plan.add_argument("--critic", nargs="?", const=True, metavar="PATH", help=about)
    about = "with a trainer's reward model on the ranks; may be repeated"
    plan.add_argument("--reward", action="append", default=[], metavar="PATH", help=about)
    plan.add_argument("--ema", action="store_true", help="with a trainer's moving average of the policy")
    plan.add_argument("--undo", type=int, default=1, metavar="N", help="last steps that can be undone (1)")
    plan.add_argument("--offload", action="append", default=[], metavar="PART", help="inference or optimizer")
    command(run_options, "what every option does")
    ps = command(run_ps, "list the running sessions")
    ps.add_argument("--json", action="store_true", help="as JSON, with all that is known")
    logs = command(run_logs, "what the workers wrote")
    logs.add_argument("name", metavar="NAME", help="of the session")
    logs.add_argument("--worker", metavar="W", help="one of them: inference, actor/0, monitor; default: all workers")
    logs.add_argument("-n", "--lines", type=int, default=20, metavar="N", help="lines of each file (20)")
    stop = command(run_stop, "stop what runs in a session, or end the cluster")
    stop.add_argument("name", nargs="?", metavar="NAME", help="of the session; without: the cluster")
    stop.add_argument("--all", action="store_true", help="the cluster with the sessions on it and their weights")
    park = command(run_park, "write a session to disk and end it")
    park.add_argument("name", nargs="?", metavar="NAME", help="of the session; without: all whose kernel is gone")
    park.add_argument("--drop-gradients", action="store_true", help="let go of gradients that wait for a step")
    park.add_argument("--list", action="store_true", help="the parked sessions, and what they take")
    park.add_argument("--drop", metavar="NAME", help="forget a parked session")
    park.add_argument("--yes", action="store_true", help="do not ask")
    kill = command(run_kill, "end a session with its weights")
    kill.add_argument("name", metavar="NAME", help="of the session")
    kill.add_argument("--yes", action="store_true", help="do not ask")
    return parser


if __name__ == "__main__":
    sys.exit(main())
