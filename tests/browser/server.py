"""A private Jupyter server on loopback: a free port, a secret token, folders that vanish with it.

The one process serves JupyterLab under ``/lab`` and, where it is installed, Notebook 7 under ``/notebooks``.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

# Without news, update checks and autosave, nothing pops up, calls out or writes while a test looks on.
SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    "@jupyterlab/apputils-extension/themes": {"adaptive-theme": False},
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},
    # The default takes cells that are off the screen, and their widgets, out of the page.
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "defer"},
}

OPTIONS = [
    "--no-browser",
    "--LabApp.expose_app_in_browser=True",  # gives the page window.jupyterapp
    "--JupyterNotebookApp.expose_app_in_browser=True",  # the same in Notebook 7
    "--LabApp.news_url=",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    "--LabApp.extension_manager=readonly",  # the other one asks a package index
    "--ServerApp.ip=127.0.0.1",
    "--ServerApp.port=0",
    "--ServerApp.allow_root=True",
    "--ServerApp.terminals_enabled=False",
    "--ServerApp.log_level=WARN",
    "--KernelManager.shutdown_wait_time=2",
]


class LabServer:
    """A running server for both front ends; leave the ``with`` block to end it and its kernels.

    Attributes:
        root: The folder that it serves.
        url: Where it listens, without a path.
        token: What a request must show.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="metaviz-lab-", ignore_cleanup_errors=True)
        self._home = Path(self._folder.name)
        self.root = self._home / "served"
        self.root.mkdir()
        self.token = secrets.token_hex(16)
        self.url = ""

    def __enter__(self) -> LabServer:
        for name, value in SETTINGS.items():
            path = self._home / "settings" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(value))
        with open(self._home / "server.log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jupyter", "lab", *OPTIONS, f"--ServerApp.root_dir={self.root}"],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_it_answers(seconds=90)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        # Kernels first: each is in a process group of its own, which ending the server's would miss.
        with contextlib.suppress(OSError):
            self.shut_down_kernels()
        self._end()

    def _environment(self) -> dict[str, str]:
        """Nothing of the developer's own Jupyter leaks in; the token is not on the command line."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("JUPYTER", "IPYTHON", "JPY_"))}
        return kept | {
            "JUPYTER_CONFIG_DIR": str(self._home / "config"),
            "JUPYTER_DATA_DIR": str(self._home / "data"),
            "JUPYTER_RUNTIME_DIR": str(self._home / "runtime"),
            "JUPYTERLAB_SETTINGS_DIR": str(self._home / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(self._home / "workspaces"),
            "IPYTHONDIR": str(self._home / "ipython"),
            "JUPYTER_PREFER_ENV_PATH": "1",
            "JUPYTER_TOKEN": self.token,
        }

    def _wait_until_it_answers(self, seconds: float) -> None:
        # The server writes the port that the system gave it into a file named after its process id.
        info = self._home / "runtime" / f"jpserver-{self._process.pid}.json"
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"JupyterLab ended with {self._process.returncode}:\n{self.log()}")
            with contextlib.suppress(OSError, ValueError):
                self.url = f"http://127.0.0.1:{json.loads(info.read_text())['port']}"
                self.request("GET", "status")
                return
            time.sleep(0.05)
        raise TimeoutError(f"JupyterLab did not answer within {seconds} seconds:\n{self.log()}")

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(5)
        self._folder.cleanup()

    def request(self, method: str, path: str) -> object:
        """Ask the server's REST API, ``request("GET", "kernels")``; None where it answers with no body."""
        request = urllib.request.Request(
            f"{self.url}/api/{path}", method=method, headers={"Authorization": f"token {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=20) as reply:
            body = reply.read()
        return json.loads(body) if body else None

    def shut_down_kernels(self) -> None:
        """End every session and kernel; the server stays up for the next test."""
        for kind in ("sessions", "kernels"):
            for one in self.request("GET", kind):
                # Ending a session ends its kernel, which may be gone when its turn comes.
                with contextlib.suppress(urllib.error.HTTPError):
                    self.request("DELETE", f"{kind}/{one['id']}")

    def log(self) -> str:
        """All that the server has printed so far."""
        return (self._home / "server.log").read_text(errors="replace")
