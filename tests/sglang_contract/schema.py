"""What SGLang publishes of the interface that `executor="sglang"` uses: names of routes, fields and server arguments.

    python -m tests.sglang_contract.schema sglang-0.5.23-….whl

reads them from the source in a wheel and writes `schema.json` beside this file. Nothing of SGLang is imported.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("schema.json")
ROUTES = "sglang/srt/entrypoints/http_server.py"
STRUCTS = "sglang/srt/managers/io_struct.py"
BODIES = {
    "/generate": "GenerateReqInput",
    "/abort_request": "AbortReq",
    "/pause_generation": "PauseGenerationReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/update_weight_version": "UpdateWeightVersionReqInput",
    "/release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "/resume_memory_occupation": "ResumeMemoryOccupationReqInput",
}
READ = ("/health_generate", "/server_info", "/flush_cache")


def published(wheel: Path) -> dict[str, Any]:
    """Read the schema out of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        text = {name: archive.read(name).decode() for name in archive.namelist() if name.endswith(".py")}
    served = set(re.findall(r"@app\.(?:get|post|api_route)\(\s*\"([^\"]+)\"", text[ROUTES]))
    arguments = [name for name in text if name.startswith("sglang/srt/arg_groups/fields/")]
    memory = next(source for source in text.values() if "def build_memory_usage(" in source)
    return {
        "version": re.search(r"sglang-([0-9.]+)", wheel.name)[1],  # type: ignore[index]
        "routes": sorted(served & {*BODIES, *READ}),
        "bodies": {route: sorted(_fields(text[STRUCTS], kind)) for route, kind in BODIES.items()},
        "sampling": sorted(_fields(text["sglang/srt/sampling/sampling_params.py"], "SamplingParams")),
        "arguments": sorted(set().union(*(_all_fields(text[name]) for name in arguments))),
        "memory_usage": re.findall(r"^        \"(\w+)\":", memory, re.M),
    }


def _fields(source: str, kind: str) -> set[str]:
    classes = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)}
    names: set[str] = set()
    while kind in classes:
        node = classes[kind]
        names |= {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and _named(one.target)}
        kind = next((base.id for base in node.bases if isinstance(base, ast.Name)), "")
    return names


def _all_fields(source: str) -> set[str]:
    kinds = [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    return set().union(*(_fields(source, kind) for kind in kinds)) if kinds else set()


def _named(target: ast.AST) -> bool:
    return isinstance(target, ast.Name)


if __name__ == "__main__":
    FILE.write_text(json.dumps(published(Path(sys.argv[1])), indent=1) + "\n")
