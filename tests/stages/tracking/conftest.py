import shutil

import pytest

from support.mlflow_runs import open_store


@pytest.fixture(scope="session")
def made_store(tmp_path_factory):
    """The file of a store that holds nothing; to make one takes seconds, to copy it none."""
    path = tmp_path_factory.mktemp("made") / "mlflow.db"
    open_store(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def new_store(made_store, tmp_path_factory):
    """Makes the file of a store that no other test uses."""
    return lambda: shutil.copy(made_store, tmp_path_factory.mktemp("store") / "mlflow.db")
