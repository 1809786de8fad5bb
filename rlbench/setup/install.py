"""Install an engine set into this Python's environment by uv, which is told what is configured for pip."""

from __future__ import annotations

import ast
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

from rlbench.setup.plan import ENGINES, SetupError, pinned_versions, plan

# Where PyTorch publishes its CPU builds; asked only where nothing configured carries them.
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# uv reads none of pip's files and variables: its own variable -> pip's option, several values separated by spaces.
VARIABLES = {
    "UV_DEFAULT_INDEX": "index-url",
    "UV_INDEX": "extra-index-url",
    "UV_NO_INDEX": "no-index",
    "UV_FIND_LINKS": "find-links",
    "UV_INSECURE_HOST": "trusted-host",
    "UV_HTTP_TIMEOUT": "timeout",
    "SSL_CERT_FILE": "cert",
    "SSL_CLIENT_CERT": "client-cert",
    "HTTP_PROXY": "proxy",
    "HTTPS_PROXY": "proxy",
}


def install(engine: str, checkout: Path | None = None, dry_run: bool = False) -> None:
    """Install the engine set, byte-compiled; with `dry_run` print the commands instead."""
    other = ENGINES["gpu" if engine == "cpu" else "cpu"]
    if other in {distribution.metadata["Name"] for distribution in distributions()}:
        raise SetupError(
            f"{other} is installed, whose files {ENGINES[engine]} would overwrite: uninstall it first "
            f"(`{sys.executable} -m pip uninstall {other}`; in a checkout: make distclean)"
        )
    # empty where the environment has no pip
    listing = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    uv, variables = find_uv(), uv_variables(parse_pip_config(listing), os.environ)
    command = [*uv, "pip", "install", "--python", sys.executable]
    if engine == "cpu":
        probe = [*command, "--quiet", "--dry-run", "--no-deps", f"torch=={pinned_versions(engine)['torch']}"]
        if subprocess.run(probe, env={**os.environ, **variables}, capture_output=True).returncode:
            variables["UV_INDEX"] = f"{variables.get('UV_INDEX', '')} {PYTORCH_CPU_INDEX}".strip()
    what = plan(engine, checkout)
    commands = [[*command, "--compile-bytecode", *what.arguments]]
    if what.apart:
        commands.insert(0, [*command, "--no-deps", *what.apart])
    if dry_run:
        settings = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        print(*(" ".join([*settings, shlex.join(line)]) for line in commands), sep="\n")
        return
    print(f"rlbench: installing the {engine} engine set into {sys.prefix} …", file=sys.stderr, flush=True)
    quiet = [] if sys.stderr.isatty() else ["--quiet"]  # uv draws its progress on a terminal
    for line in commands:
        if subprocess.run([*line, *quiet], env={**os.environ, **variables}).returncode:
            raise SetupError("uv could not install it: what it said above names what is missing (docs/install.md)")


def find_uv() -> list[str]:
    """Return the command that runs uv: this environment's, one on the path, or one that pip installs now."""
    own = [sys.executable, "-m", "uv"]
    if find_spec("uv"):
        return own
    if on_path := shutil.which("uv"):
        return [on_path]
    if subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "uv>=0.9,<1"]).returncode:
        raise SetupError("uv is not there and pip could not install it: install uv, and run again")
    return own


def parse_pip_config(listing: str) -> dict[str, str]:
    """Read lines `scope.option='value'`; of several scopes the strongest wins: environment, `[install]`, `[global]`."""
    scopes: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        scope, _, option = key.strip().rpartition(".")
        if scope in scopes:
            scopes[scope][option] = str(ast.literal_eval(value.strip()))
    return {option: value for scope in scopes.values() for option, value in scope.items()}


def uv_variables(pip: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return pip's options as uv's variables; those that `environ` sets already are left alone."""
    if "default-timeout" in pip:
        pip = {"timeout": pip["default-timeout"], **pip}
    variables = {name: " ".join(pip[option].split()) for name, option in VARIABLES.items() if pip.get(option)}
    if "UV_FIND_LINKS" in variables:
        variables["UV_FIND_LINKS"] = variables["UV_FIND_LINKS"].replace(" ", ",")
    # pip asks every index for the best version; uv would stop at the first that has the package at all
    variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return {name: value for name, value in variables.items() if name not in environ}
