"""Silences MLflow, and shortens its waits for a server that does not answer."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
CHATTY = ("mlflow", "alembic", "urllib3")
WARNING = ("mlflow", "sqlalchemy", "alembic", "pydantic", "urllib3")


def silence_mlflow() -> None:
    """Sets for the whole process what the user has not set; MLflow reads some of it at import."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


@contextmanager
def mlflow_silenced() -> Iterator[None]:
    """As `silence_mlflow`, and drops log lines and warnings of MLflow while the block runs.

    Another thread is silenced too. Filters of warnings belong to the whole process: the thread that
    works enters and leaves, and the one that sends changes none.
    """
    unset = [name for name in DEFAULTS if name not in os.environ]
    loggers = [one for one in map(logging.getLogger, CHATTY) if one.level == logging.NOTSET]
    with warnings.catch_warnings():
        for package in WARNING:
            warnings.filterwarnings("ignore", module=package)
        silence_mlflow()
        for one in loggers:
            one.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for one in loggers:
                one.setLevel(logging.NOTSET)
            for name in unset:
                os.environ.pop(name, None)
