"""Write what the side panel takes over from Python: the view's types, its texts, and reports for its tests.

python scripts/panel_schema.py           extension/src/schema.ts and extension/src/reports.json
python scripts/panel_schema.py --check   say whether they are those of the sources
"""

from __future__ import annotations

import ast
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

from rlbench.monitor import schema, view

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "extension" / "src"
CLASSES = (
    schema.Phase,
    schema.Control,
    schema.Part,
    schema.EngineView,
    schema.Failure,
    schema.SessionView,
)
PLAIN = {str: "string", bool: "boolean", int: "number", float: "number", type(None): "null", Any: "unknown"}
READ = ("time", "step", "version", "branch", "engines", "history_total", "history", "samples")
"""What the panel reads beside the view."""
MIB = 1 << 20
NOW = 1000.0


def typescript() -> str:
    """The module schema.ts."""
    blocks = [_interface(one) for one in CLASSES]
    texts = "\n".join(f"  {call};" for call in _texts(Path(view.__file__).read_text(encoding="utf-8")))
    return f"""/** Made from rlbench/monitor/schema.py and view.py by scripts/panel_schema.py: change those. */
import type {{ Trans }} from './text';

/** Data, or a template with `%1`, `%2` and its arguments; `[one, many]` where the first of them, a count, decides. */
export type Text = string | number | readonly [string | readonly [string, string], ...Text[]];

{chr(10).join(blocks)}
/** Never called: here the tools that collect what is to be translated find the texts of the view. */
export function catalogue(trans: Trans): void {{
{texts}
}}
"""


def reports() -> dict[str, Any]:
    """Answers of `GET /state`, by what is shown in them; names that a translator leaves alone begin with DATA."""
    rollout = {"id": "a", "what": "rollout 5", "engine": "inference", "since": NOW - 10}
    replicas = [{"tokens": 100, "finished": 12, "total": 32}, {"tokens": 50, "finished": 4, "total": 32}]
    running = {**rollout, "progress": replicas}
    training = {**rollout, "what": "DATA", "progress": [{"phase": "DATA", "done": 1, "total": 2}]}
    dead = {"pid": 7, "mode": "notebook", "alive": False}
    actor, inference = _engine("actor", "train"), _engine("inference", "inference")
    moved = [
        {**actor, "name": "DATA", "frees": {"weights": 0}},
        {**inference, "state": {"weights": "meta", "kv_cache": "torn", "version": 3}},
        {**inference, "name": "inference2", "state": {"weights": "empty", "kv_cache": "meta"}},
    ]
    alone = {"engines": [actor]}
    changes: dict[str, dict[str, Any]] = {
        "idle": {},
        "running": {"running": [running], "branch": "fork"},
        "training": {**alone, "running": [training], "verbs": [{"what": "DATA step", "since": NOW}]},
        "paused": {"running": [running], "paused": True},
        "failed": {**alone, "last_error": {"what": "DATA", "kind": "DATA", "message": "DATA", "time": 1}},
        "lost": {**alone, "driver": dead, "lease": {"left_s": 60.0}},
        "leased": {**alone, "driver": dead, "lease": {"left_s": 60.0, "parks": True}},
        "script": {**alone, "driver": {**dead, "mode": "script"}},
        "building": {"engines": [{**actor, "ready": False}]},
        "broken": {"engines": [{**actor, "broken": "DATA"}]},
        "moved": {"version": 9, "engines": moved},
    }
    return {name: _report(change) for name, change in changes.items()}


def _report(change: dict[str, Any]) -> dict[str, Any]:
    report = {
        "time": NOW,
        "model": "tiny",
        "step": 4,
        "version": 4,
        "branch": "main",
        "paused": False,
        "engines": [_engine("actor", "train"), _engine("inference", "inference")],
        "running": [],
        "verbs": [],
        "driver": {"pid": 7, "mode": "notebook", "alive": True, "age_s": 0.1},
        "lease": {"seconds": 28800.0, "silent_s": 1.0, "left_s": None},
        "history_total": 4,
        "history": [],
        "last_error": None,
        "samples": [],
        **change,
    }
    return {key: report[key] for key in READ} | {"view": view.view_of(report, NOW)}


def _engine(name: str, kind: str) -> dict[str, Any]:
    trains = kind == "train"
    return {
        "name": name,
        "kind": kind,
        "executor": "fsdp2" if trains else "vllm",
        "ready": True,
        "broken": None,
        "state": {"weights": "cuda"} | ({"optimizer": "cpu"} if trains else {"kv_cache": "cuda", "version": 3}),
        "bytes": {"weights": 100 * MIB, "gradients": 50 * MIB} if trains else {},
        "frees": {"weights": 100 * MIB} if trains else {"kv_cache": 1024 * MIB},
        "workers": [{"name": f"rlbench/demo/{name}/0", "pid": 1, "resident": (900 if trains else 2048) * MIB}],
    }


def _interface(one: type) -> str:
    lines = [f"  readonly {name}: {_type(hint)};" for name, hint in typing.get_type_hints(one).items()]
    return f"export interface {one.__name__} {{\n" + "\n".join(lines) + "\n}\n"


def _type(hint: Any) -> str:
    if hint == schema.Text:
        return "Text"
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return " | ".join(map(_type, args))
    if origin is typing.Literal:
        return " | ".join(f"'{value}'" for value in args)
    if origin is list:
        return f"readonly {_type(args[0])}[]"
    if origin is dict:
        return f"Readonly<Record<{_type(args[0])}, {_type(args[1])}>>"
    return PLAIN.get(hint) or str(hint.__name__)


def _texts(source: str) -> list[str]:
    """A call of the catalogue for each text that the view is made of."""
    found: dict[str, None] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            literals = [f"'{arg.value}'" for arg in node.args if isinstance(arg, ast.Constant)]
            if node.func.id == "text" and any(letter.isalpha() for letter in literals[0]):
                found[f"trans.__({literals[0]})"] = None
            elif node.func.id == "plural":
                found[f"trans._n({literals[0]}, {literals[1]}, 1)"] = None
    return sorted(found)


def _lines(values: dict[str, Any]) -> str:
    """JSON with a line for each value."""
    lines = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(arguments: list[str]) -> int:
    """Write the files, or with `--check` compare them."""
    made = {"schema.ts": typescript(), "reports.json": _lines(reports())}
    for name, content in made.items():
        path = SOURCES / name
        if "--check" not in arguments:
            path.write_text(content, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != content:
            print(f"extension/src/{name} is not made from the sources: python scripts/panel_schema.py", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
