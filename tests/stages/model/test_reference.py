from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

from align.schemas.config import ModelOptions
from align.schemas.errors import UsageError
from align.schemas.rows import OutOfMemory, Tree
from align.stages.model import reference as module
from align.stages.model.load import load_causal_lm, quiet, resolve
from align.stages.model.logprobs import choose_path
from align.stages.model.reference import HfReference, TreeScorer
from support.adapters import saved_adapter
from support.families import TREE_FAMILIES, tiny_model

pytestmark = pytest.mark.numeric

TREE = Tree(np.array([3, 4, 5], np.int32), (np.array([6], np.int32), np.array([7, 8], np.int32)))


def test_a_reference_knows_itself_before_its_weights_are_loaded(saved_llama, monkeypatch):
    monkeypatch.setattr(module, "load_causal_lm", lambda _options: pytest.fail("loaded"))
    reference = HfReference(ModelOptions(path=str(saved_llama)))
    identity = reference.identity()
    assert identity["model.dtype"] == "bfloat16"
    assert identity["model.attention"] == "sdpa"
    assert identity["model.adapter"] == identity["model.code"] == "none"
    assert all(identity.values())
    assert reference.hidden_size() == 32


def test_the_scorer_of_a_folder_scores_in_the_dtype_asked_for(saved_llama):
    scorer = HfReference(ModelOptions(path=str(saved_llama), dtype="float32")).open()
    assert scorer.model.dtype == torch.float32
    assert scorer.path.worst_difference < 1e-4
    assert scorer.score([TREE]).shape == (3,)


def test_a_way_to_score_that_another_rank_refuses_is_not_taken(saved_llama):
    model = load_causal_lm(ModelOptions(path=str(saved_llama), dtype="float32"))
    here = []
    path = choose_path(model.eval(), lambda holds: here.append(holds) or len(here) > 1)
    assert here == [True, True]  # the fastest holds here, and not there
    assert path.layout == "tree"


def test_an_adapter_changes_the_scores_and_keeps_the_fast_path(saved_llama, tmp_path):
    options = ModelOptions(path=str(saved_llama), dtype="float32")
    adapter = saved_adapter(tmp_path, saved_llama, lora_dropout=0.5)
    adapted = replace(options, adapter=str(adapter))
    base, scorer = HfReference(options).open(), HfReference(adapted).open()
    assert scorer.path.head == "fused"
    assert not scorer.model.training
    assert np.abs(scorer.score([TREE]) - base.score([TREE])).max() > 1e-3
    assert HfReference(adapted).identity() != HfReference(options).identity()


def test_an_adapter_on_the_head_is_not_bypassed(saved_llama, tmp_path, caplog):
    adapter = saved_adapter(tmp_path, saved_llama, target_modules=["lm_head"])
    options = ModelOptions(path=str(saved_llama), dtype="float32", adapter=str(adapter))
    scorer = HfReference(options).open()
    assert scorer.path.head == "exact"
    assert "not a plain projection" in caplog.text


def test_an_adapter_of_prompt_tokens_is_refused(saved_llama, tmp_path):
    options = ModelOptions(path=str(saved_llama))
    settings = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with quiet():
        get_peft_model(load_causal_lm(options), settings).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="prompt tokens"):
        load_causal_lm(ModelOptions(path=str(saved_llama), adapter=str(tmp_path)))


@pytest.mark.parametrize(
    "failure",
    [lambda: raise_(torch.OutOfMemoryError("CUDA out of memory")), lambda: torch.empty(1 << 55)],
)
def test_a_full_memory_asks_for_a_smaller_batch(llama, monkeypatch, failure):
    scorer = TreeScorer(llama)
    monkeypatch.setattr(module, "tree_logps", lambda *_: failure())
    with pytest.raises(OutOfMemory, match="1 trees of 6 tokens"):
        scorer.score([TREE])


def test_other_failures_are_not_taken_for_a_full_memory(llama, monkeypatch):
    scorer = TreeScorer(llama)
    failure = RuntimeError("shapes differ")
    monkeypatch.setattr(module, "tree_logps", lambda *_: raise_(failure))
    with pytest.raises(RuntimeError, match="shapes differ"):
        scorer.score([TREE])


def test_weights_that_lack_a_tensor_are_refused(saved_llama, tmp_path):
    tensors = load_file(saved_llama / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((saved_llama / "config.json").read_text())
    with pytest.raises(UsageError, match=r"lack 1 tensors.*layers\.1\.mlp\.up_proj"):
        load_causal_lm(ModelOptions(path=str(tmp_path)))


def test_an_unknown_architecture_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(UsageError, match="no_such_model"):
        HfReference(ModelOptions(path=str(tmp_path))).hidden_size()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_refused(saved_llama):
    with pytest.raises(UsageError, match="no GPU"):
        load_causal_lm(ModelOptions(path=str(saved_llama), device="cuda"))


def raise_(error):
    raise error


@pytest.mark.parametrize("asked", ["auto", "sdpa"])
def test_the_soft_cap_of_an_attention_is_never_left_out(asked, tmp_path, monkeypatch):
    model = tiny_model(*TREE_FAMILIES["gemma2"])
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)  # as older versions say
    options = ModelOptions(path=str(tmp_path), attention=asked)
    if asked == "auto":
        assert resolve(options).attention == "eager"
    else:
        with pytest.raises(UsageError, match="sdpa would leave the cap out"):
            resolve(options)
