"""A real JupyterLab for tests: a server of its own on loopback, apart from the user's in all but the cached models."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

START_LIMIT_S = 300.0
SETTINGS = {
    # a pop-up about news would cover a corner of the page, and the server has nobody to fetch them from
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
}

PAGE = {"buildCheck": False}
"""Of each page: else JupyterLab starts node at each load, to ask whether it should be built anew."""


class Lab:
    """A JupyterLab on loopback with its own home, settings, workspaces and state folder of rlbench.

    The cache of models is the user's, so that the tiny model is not made again. `root`: where notebooks lie.
    `state`: the XDG_STATE_HOME of its kernels, so that their sessions are apart from those of the tests' process.
    """

    def __init__(self, folder: Path, *, base_url: str = "/", state: Path | None = None, **environ: str) -> None:
        """Start a server below `folder`.

        Args:
            base_url: what its addresses begin with, as `/user/ada/` behind a JupyterHub.
            state: the state folder of another lab, whose cluster this one's kernels join and leave as it is.
            environ: added to its environment (and its kernels').
        """
        self.root, self.home, self.state = folder / "root", folder / "home", state or folder / "state"
        self.token, self._base_url, self._own_state = secrets.token_hex(16), base_url, state is None
        self._runtime, self._share = self.home / "runtime", self.home / "share"
        for path in (self.root, self.home, self.state, self._runtime, self._share):
            path.mkdir(parents=True, exist_ok=True)
        self._write_settings()
        self._log = open(folder / "lab.log", "w+")
        self.environ = self._environment() | environ
        self._process = subprocess.Popen(
            self._command(),
            env=self.environ,
            cwd=self.root,
            stdout=self._log,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self.url = self._wait_until_it_answers()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id of the server; kernels are its children."""
        return self._process.pid

    @property
    def log(self) -> str:
        """What the server and the kernels' processes wrote so far."""
        return Path(self._log.name).read_text(errors="replace")

    def ask(self, path: str, method: str = "GET", body: Any = None) -> Any:
        """The JSON answer of one of the server's addresses (`api/sessions`, `rlbench/api/sessions`), logged in.

        Raises urllib.error.HTTPError where the server refuses.
        """
        request = urllib.request.Request(
            f"{self.url}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"token {self.token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def add_kernel(self, name: str, environ: dict[str, str]) -> None:
        """Offer a further kernel to notebooks opened from now on: this Python with `environ`."""
        folder = self._share / "kernels" / name
        folder.mkdir(parents=True, exist_ok=True)
        spec = {
            "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            "display_name": name,
            "language": "python",
            "env": environ,
        }
        (folder / "kernel.json").write_text(json.dumps(spec))

    def kernel_process(self, kernel_id: str) -> psutil.Process | None:
        """The process of a kernel, by the server's id of it; None while there is none."""
        for child in psutil.Process(self.pid).children():
            try:
                named = any(kernel_id in word for word in child.cmdline())
                if named and child.status() != psutil.STATUS_ZOMBIE:
                    return child
            except psutil.NoSuchProcess:
                continue
        return None

    def close(self) -> None:
        """End the server with its kernels, then whatever cluster they left in a state folder of its own."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        if not self._own_state:
            return
        stop = "import sys; from rlbench.cli import main; sys.exit(main(['stop', '--all']))"
        done = subprocess.run(
            [sys.executable, "-c", stop], env=self.environ, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"the cluster of JupyterLab's kernels did not end: {done.stdout}{done.stderr}"

    def _command(self) -> list[str]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        return [
            sys.executable,
            "-m",
            "jupyterlab",
            "--allow-root",
            "--no-browser",
            "--ServerApp.ip=127.0.0.1",
            f"--ServerApp.port={port}",
            f"--IdentityProvider.token={self.token}",
            f"--ServerApp.base_url={self._base_url}",
            f"--ServerApp.root_dir={self.root}",
            f"--LabApp.workspaces_dir={self.home / 'workspaces'}",
            "--LabApp.expose_app_in_browser=True",
            "--LabApp.news_url=",
            "--LanguageServerManager.autodetect=False",  # else npm is asked where it would have put some
            # a run that is killed leaves no server behind for ever
            "--ServerApp.shutdown_no_activity_timeout=900",
            "--MappingKernelManager.cull_idle_timeout=900",
        ]

    def _environment(self) -> dict[str, str]:
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "JUPYTER_", "JPY_", "PYTEST_"))}
        return kept | {
            "HOME": str(self.home),
            "XDG_CACHE_HOME": cache,
            "XDG_STATE_HOME": str(self.state),
            "JUPYTER_RUNTIME_DIR": str(self._runtime),
            "JUPYTER_CONFIG_DIR": str(self.home / "config"),
            "JUPYTER_PATH": str(self._share),
            "JUPYTER_PREFER_ENV_PATH": "1",
            "IPYTHONDIR": str(self.home / "ipython"),
            "RLBENCH_LEASE_S": "600",  # a run that is killed leaves no engines behind for hours
        }

    def _write_settings(self) -> None:
        for name, values in SETTINGS.items():
            path = self.home / "config/lab/user-settings/@jupyterlab" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))
        page = self.home / "config/labconfig/page_config.json"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(json.dumps(PAGE))

    def _wait_until_it_answers(self) -> str:
        """The server's address: it says itself which port it took."""
        record, deadline = self._runtime / f"jpserver-{self.pid}.json", time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self.url = str(json.loads(record.read_text())["url"])
                self.ask("api/status")
                return self.url
            except (OSError, ValueError):
                time.sleep(0.1)
        raise RuntimeError(f"JupyterLab did not start:\n{self.log[-3000:]}")
