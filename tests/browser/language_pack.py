"""A JupyterLab language pack as the real ones are, made from the panel's own texts: each comes back between «».

So a page in that language shows which texts come out of the catalogue, and which do not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from babel.messages.catalog import Catalog
from babel.messages.mofile import write_mo

LOCALE = "pl_PL"
"""Three plural forms: one (1), few (2 to 4), many (5 and more)."""
PLURALS = "nplurals=3; plural=(n==1 ? 0 : n%10>=2 && n%10<=4 && (n%100<10 || n%100>=20) ? 1 : 2);"
OF_LAB = {"Notebook": "Zeszyt"}
QUOTED = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
CALL = re.compile(rf"\btrans\._(?:_|n)\(\s*{QUOTED}(?:,\s*{QUOTED})?")


def write(site: Path, extension: Path) -> None:
    """Install the pack below `site`, a folder to be put on PYTHONPATH; `extension`: where the TypeScript lies."""
    module = f"jupyterlab_language_pack_{LOCALE}"
    (site / module).mkdir(parents=True)
    (site / module / "__init__.py").write_text("")
    info = site / f"{module}-0.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text(f"[jupyterlab.languagepack]\n{LOCALE} = {module}\n")
    messages = site / module / "locale" / LOCALE / "LC_MESSAGES"
    messages.mkdir(parents=True)
    lab = Catalog(LOCALE, domain="jupyterlab")
    for text, translated in OF_LAB.items():
        lab.add(text, translated)
    _save(lab, messages / "jupyterlab")
    _save(_panels(extension), messages / "rlbench")


def _panels(extension: Path) -> Catalog:
    """Every text that the sources ask a catalogue for."""
    catalog = Catalog(LOCALE, domain="rlbench")
    for path in sorted((extension / "src").rglob("*.ts*")):
        for one, many in CALL.findall(path.read_text()) if ".test." not in path.name else ():
            if many:
                forms = ("one", "few", "many")
                texts = (_unquoted(one), *[_unquoted(many)] * 2)
                catalog.add(
                    (_unquoted(one), _unquoted(many)),
                    tuple(f"«{form} {text}»" for form, text in zip(forms, texts, strict=True)),
                )
            else:
                catalog.add(_unquoted(one), f"«{_unquoted(one)}»")
    for context, text in _settings(json.loads((extension / "schema" / "panel.json").read_text())):
        catalog.add(text, f"«{text}»", context=context)
    return catalog


def _settings(schema: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Context and text of what JupyterLab translates of a settings schema."""
    yield from (("schema", schema[key]) for key in ("title", "description"))
    yield "settings", schema["jupyter.lab.setting-icon-label"]
    for entry in schema["properties"].values():
        yield from (("settings", entry[key]) for key in ("title", "description"))


def _unquoted(source: str) -> str:
    """The text of a JavaScript string."""
    return re.sub(r"\\(.)", r"\1", source[1:-1])


def _save(catalog: Catalog, path: Path) -> None:
    """As `.json` for the page and `.mo` for the server."""
    about = {"domain": catalog.domain, "language": LOCALE.replace("_", "-"), "plural_forms": PLURALS}
    found: dict[str, Any] = {"": about}
    for message in catalog:
        if message.id:
            first = message.id[0] if isinstance(message.id, tuple) else message.id
            key = f"{message.context}\x04{first}" if message.context else first
            found[key] = list(message.string) if isinstance(message.string, tuple) else [message.string]
    path.with_suffix(".json").write_text(json.dumps(found))
    with open(path.with_suffix(".mo"), "wb") as file:
        write_mo(file, catalog)
