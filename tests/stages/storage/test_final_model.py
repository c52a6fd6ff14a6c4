import os

import pytest

from align.stages.storage.run_folder import save_model


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_the_umask_decides_who_may_read_a_model(tmp_path, mask, mode):
    """Whatever the library thought that wrote it: safetensors lets nobody else read its files."""

    def write(draft):
        for name in ("model.safetensors", "config.json"):
            (draft / name).write_text(name)
        (draft / "model.safetensors").chmod(0o600)

    before = os.umask(mask)
    try:
        save_model(tmp_path / "model", write, "run")
    finally:
        os.umask(before)
    found = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert found == {"model.safetensors": mode, "config.json": mode}
