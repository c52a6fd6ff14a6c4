import pytest

from align.stages.server import server_client


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """What is sent again is so at once, and later in no time."""
    monkeypatch.setattr(server_client, "FIRST_PAUSE", 0.002)
