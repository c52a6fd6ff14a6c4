"""Models and data sets of the Hugging Face Hub, by huggingface_hub's own client."""

import os
import subprocess
import sys

from support.stub_hub import TOKEN


def test_a_large_file_comes_whole_from_another_host_which_gets_no_token(hub, tmp_path):
    files = {"config.json": b"{}", "model.safetensors": b"weights" * 9, "sub/a.json": b"[]"}
    commit = hub.repo("acme/tiny", gated=True).commit(files)
    program = "import huggingface_hub as hub; print(hub.snapshot_download('acme/tiny'))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | hub.environment(tmp_path, TOKEN),
        capture_output=True,
        text=True,
        check=True,
    )
    snapshot = tmp_path / "hub" / "models--acme--tiny" / "snapshots" / commit
    assert done.stdout.strip() == str(snapshot)
    assert {name: (snapshot / name).read_bytes() for name in files} == files
    assert hub.fetched() == files.keys()
    assert {one.token for one in hub.requests if "/lfs/" in one.path} == {""}
