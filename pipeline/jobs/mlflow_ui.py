"""MLflow's pages for the store in which runs are recorded here, on this machine alone."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ...schemas.config import TrackingOptions
from ...schemas.errors import UsageError
from ...schemas.safe_text import masked_address, redacted
from ...stages.tracking.mlflow_silence import DEFAULTS
from ...stages.tracking.mlflow_sqlite import sqlite_file
from ...stages.tracking.mlflow_tracker import plain_uri, store_uri

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Pages:
    """The program that serves the pages, and what it finds in its environment."""

    shown: str
    words: tuple[str, ...]
    environment: dict[str, str]  # whose secrets no list of processes shows

    def serve(self) -> NoReturn:
        """Becomes that program."""
        os.execve(self.words[0], self.words, {**os.environ, **self.environment})


def pages_of(options: TrackingOptions, *, port: int) -> Pages:
    """The pages of the store of the config, else the environment, else the file here."""
    uri = store_uri(options, Path())
    if uri.partition(":")[0] in ("http", "https"):
        raise UsageError(
            f"{masked_address(uri)} is a server, which shows its runs itself: open it in a browser."
        )
    path = sqlite_file(uri)
    if path and not path.exists():
        raise UsageError(
            f"{path.absolute()} is not there: no run was recorded in it. Run the command in the "
            "folder of your runs, or name another store by --uri."
        )
    module = ("-m", "mlflow", "ui", "--host", HOST, "--port", str(port), "--workers", "1")
    return Pages(
        shown=f"http://{HOST}:{port} shows {redacted(plain_uri(uri))}; Ctrl-C ends it.",
        words=(sys.executable, *module),
        # Safe path: no module is taken from the folder here, which may be somebody else's.
        environment={"MLFLOW_BACKEND_STORE_URI": uri, "PYTHONSAFEPATH": "1", **DEFAULTS},
    )
