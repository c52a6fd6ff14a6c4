"""MLflow without its own voice, and without patience for a server that does not answer."""

from __future__ import annotations

import logging
import os

DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
CHATTY = ("mlflow", "alembic", "urllib3")


def hush() -> None:
    """Sets what the user has not set; call it before MLflow is imported, which reads it then."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    for name in CHATTY:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.ERROR)
