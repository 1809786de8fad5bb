"""The Jupyter server extension: the sessions of this machine under `/rlbench/api/`, for the side panel.

Loaded by the Jupyter server, so it imports neither ray nor torch: the state folder says which sessions there are, each
session's monitor answers over its loopback endpoint (docs/monitor-api.md), and this passes it on to who is logged in.
"""

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
