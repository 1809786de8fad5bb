"""Where packages come from: pip's configuration, said in uv's words.

uv reads none of pip's files and none of its `PIP_*` variables. People and their companies configure pip; so
what pip would do is read from pip itself (`pip config list`) and handed to uv as options.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field

# The one address in this repository: where PyTorch publishes its CPU builds.
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

_TRUE = {"1", "true", "yes", "on"}
_SCOPES = ("global", "install", ":env:")  # later ones win, as in pip


@dataclass(frozen=True)
class UvOptions:
    """Options of `uv pip install`, and the variables its process needs beside the inherited ones."""

    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def with_index(self, url: str) -> UvOptions:
        """The same options with one more index."""
        return UvOptions((*self.flags, "--index", url), self.env)


def parse_pip_config(listing: str) -> dict[str, str]:
    """Read what `pip config list` prints and return option name -> value, as `pip install` would see them.

    Each line is `scope.option='value'`; of several scopes the strongest wins (environment, `[install]`,
    `[global]`). Options of other commands are left out.
    """
    found: dict[str, dict[str, str]] = {scope: {} for scope in _SCOPES}
    for line in listing.splitlines():
        key, separator, value = line.partition("=")
        scope, dot, option = key.strip().rpartition(".")
        if separator and dot and scope in found:
            found[scope][option.replace("_", "-")] = str(ast.literal_eval(value.strip()))
    return {option: value for scope in _SCOPES for option, value in found[scope].items()}


def uv_options(pip: Mapping[str, str], environ: Mapping[str, str]) -> UvOptions:
    """Translate pip's options (see `parse_pip_config`) for uv.

    Variables that the caller's environment already sets for uv are left alone. Every index is asked for the
    best version, as pip does, instead of uv's own first-index rule: an extra index that carries one old build
    must not hide the rest.
    """
    flags: list[str] = ["--index-strategy", "unsafe-best-match"]
    if pip.get("no-index", "").lower() in _TRUE:
        flags.append("--no-index")
    for url in pip.get("index-url", "").split():
        flags += ["--default-index", url]
    for option, flag in (
        ("extra-index-url", "--index"),
        ("find-links", "--find-links"),
        ("trusted-host", "--allow-insecure-host"),
    ):
        for value in pip.get(option, "").split():
            flags += [flag, value]
    wanted = {
        "SSL_CERT_FILE": pip.get("cert"),
        "SSL_CLIENT_CERT": pip.get("client-cert"),
        "HTTP_PROXY": pip.get("proxy"),
        "HTTPS_PROXY": pip.get("proxy"),
        "UV_HTTP_TIMEOUT": pip.get("timeout") or pip.get("default-timeout"),
        "UV_KEYRING_PROVIDER": "subprocess" if pip.get("keyring-provider") == "subprocess" else None,
    }
    env = {name: value for name, value in wanted.items() if value and name not in environ}
    return UvOptions(tuple(flags), env)
