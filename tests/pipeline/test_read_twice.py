"""What a run reads more than once may not change meanwhile: data, tokenizer, model."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from align.pipeline.precompute.precompute import precompute
from align.pipeline.tables.score_rewards import rewards_from_model
from align.schemas.config import ModelOptions
from align.schemas.data_options import DataOptions
from align.schemas.errors import FingerprintError
from align.stages.model.reference import HfReference
from align.stages.storage.cache import Cache
from support.refusals import refuses
from support.stage_one import Acting, Silent, run
from support.stub_reference import StubReference


def once(act, *, scored=False):
    """Acts when rows have first been read, or scored."""
    left = [act]
    return Acting(advanced=lambda tokens: bool(tokens) == scored and left and left.pop()())


@pytest.fixture
def own_data(config, data, tmp_path):
    """The same config over files that may be changed."""
    path = shutil.copy(data.paired_jsonl, tmp_path / "rows.jsonl")
    return replace(config, data=DataOptions(files=[str(path)]))


def test_a_file_that_grows_while_it_is_read_is_refused(own_data):
    path = Path(own_data.data.files[0])

    def grow():
        with path.open("a") as file:
            file.write(json.dumps({"prompt": "And?", "chosen": "yes", "rejected": "no"}) + "\n")

    with refuses(FingerprintError, "rows.jsonl"):
        precompute(own_data, StubReference(), progress=once(grow))
    folder = Cache(Path(own_data.cache.output))
    assert not folder.manifest_file.exists()
    run(own_data)
    (entry,) = folder.manifest().inputs
    assert (entry.rows, entry.bytes) == (121, path.stat().st_size)


def test_a_tokenizer_that_changes_before_rows_are_read_is_refused(own_data, tmp_path):
    model = shutil.copytree(own_data.model.path, tmp_path / "model")
    own = replace(own_data, model=ModelOptions(path=str(model)))
    template = next(model.glob("chat_template*"))
    meddling = Acting(begun=lambda _: template.write_text(template.read_text() + " "))
    with refuses(FingerprintError, "tokenizer"):
        precompute(own, StubReference(), progress=meddling)


@pytest.mark.parametrize("when", ["loaded", "scored"])
def test_a_model_that_is_written_over_while_it_is_used_is_refused(config, world, tmp_path, when):
    model = shutil.copytree(world.model, tmp_path / "model")
    weights = model / "model.safetensors"

    def overwrite():
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)

    class Overwritten(HfReference):
        def open(self):
            if when == "loaded":
                overwrite()
            return super().open()

    own = replace(config, model=ModelOptions(path=str(model)))
    progress = once(overwrite, scored=True) if when == "scored" else Silent()
    with refuses(FingerprintError, "model.safetensors"):
        precompute(own, Overwritten(own.model), progress=progress)
    assert not Cache(Path(own.cache.output)).manifest_file.exists()


def test_a_file_that_changes_between_its_scores_and_its_rows_is_refused(own_data, tmp_path):
    path, output = Path(own_data.data.files[0]), tmp_path / "scored"
    rewards = replace(own_data.rewards, model=own_data.model.path, output=str(output))

    def shrunk(_):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
        return StubReference()

    with refuses(FingerprintError, "rows.jsonl"):
        rewards_from_model(replace(own_data, rewards=rewards), shrunk, progress=Silent())
    assert not (output / "rows.jsonl").exists()
