"""The Jupyter server extension: this machine's sessions under `/rlbench/api/`. It imports neither ray nor torch."""

from __future__ import annotations

from typing import Any


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    """What Jupyter loads."""
    return [{"module": "rlbench.labapp"}]


def _load_jupyter_server_extension(server: Any) -> None:
    """Add the handlers to a starting Jupyter server."""
    from rlbench.labapp.handlers import routes

    server.web_app.add_handlers(".*$", routes(server.web_app.settings["base_url"]))
    server.log.info("rlbench: sessions of this machine at /rlbench/api/")
