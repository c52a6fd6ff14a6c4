"""A reference as its folder gives it, its full memory, or spread."""

import os
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from align.schemas.config import ModelOptions
from align.schemas.errors import UsageError
from align.schemas.rows import OutOfMemory, Tree
from align.stages.model import reference as module
from align.stages.model.load import load_causal_lm, rank_device, resolve
from align.stages.model.path_search import choose_path
from align.stages.model.reference import HfReference, TreeScorer
from support.families import TREE_FAMILIES, mixed_trees, saved_adapter, tiny_model
from support.refusals import refuses

pytestmark = pytest.mark.numeric

TREE = Tree(np.array([3, 4, 5], np.int32), (np.array([6], np.int32), np.array([7, 8], np.int32)))


def options_of(folder, **how):
    return ModelOptions(path=str(folder), **how)


def test_a_reference_knows_itself_before_it_is_built_or_its_weights_are_loaded(
    saved_llama, monkeypatch
):
    monkeypatch.setattr(module, "load_causal_lm", lambda _options: pytest.fail("loaded"))
    reference = HfReference(options_of(saved_llama))
    with monkeypatch.context() as patched:
        patched.setattr(PreTrainedModel, "__init__", lambda *_: pytest.fail("built"))
        assert reference.hidden_size() == 32
    identity = reference.identity()
    assert (identity["model.dtype"], identity["model.attention"]) == ("bfloat16", "sdpa")
    assert identity["model.adapter"] == "none"
    assert all(identity.values())


def test_a_way_to_score_that_another_rank_refuses_is_not_taken(saved_llama):
    model = load_causal_lm(options_of(saved_llama, dtype="float32"))
    here = []
    path = choose_path(model.eval(), lambda holds: here.append(holds) or len(here) != 2)
    # The head; the fastest layout, which fails there; the next one, which does not leak either.
    assert here == [True, True, True, True]
    assert path.layout == "tree"


@pytest.mark.parametrize(("target", "head"), [("q_proj", "fused"), ("lm_head", "exact")])
def test_an_adapter_changes_the_scores_and_is_never_bypassed(saved_llama, tmp_path, target, head):
    options = options_of(saved_llama, dtype="float32")
    adapter = saved_adapter(tmp_path, saved_llama, lora_dropout=0.5, target_modules=[target])
    adapted = replace(options, adapter=str(adapter))
    base, scorer = HfReference(options).open(), HfReference(adapted).open()
    assert scorer.path.head == head
    assert not scorer.model.training
    assert np.abs(scorer.score([TREE]) - base.score([TREE])).max() > 1e-3
    assert HfReference(adapted).identity() != HfReference(options).identity()


def test_only_a_full_memory_asks_for_a_smaller_batch(llama, monkeypatch):
    scorer = TreeScorer(llama)
    full = torch.OutOfMemoryError("CUDA out of memory"), OutOfMemory, "1 trees of 6 tokens"
    other = RuntimeError("shapes differ"), RuntimeError, "shapes differ"
    for failure, expected, said in (full, other):
        failing = mock.Mock(side_effect=failure)
        monkeypatch.setattr(module, "tree_logps", failing)
        with refuses(expected, said):
            scorer.score([TREE])
    # As the allocator of a CPU says it.
    monkeypatch.setattr(module, "tree_logps", lambda *_: torch.empty(1 << 55))
    with pytest.raises(OutOfMemory):
        scorer.score([TREE])


def test_an_unknown_architecture_and_a_gpu_that_is_not_there_are_refused(
    saved_llama, tmp_path, monkeypatch
):
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with refuses(UsageError, "no_such_model"):
        HfReference(options_of(tmp_path)).hidden_size()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refuses(UsageError, "model.device", "cuda"):
        load_causal_lm(options_of(saved_llama, device="cuda"))


SRUN = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5"}


@pytest.mark.parametrize(
    ("environment", "gpus", "expected"),
    [
        ({}, 4, "cuda"),  # alone, on the GPU that is chosen
        ({"LOCAL_RANK": "3"}, 4, "cuda:3"),
        ({"LOCAL_RANK": "3"}, 2, "cuda:1"),
        (SRUN | {"SLURM_LOCALID": "3"}, 4, "cuda:3"),
        (SRUN | {"SLURM_LOCALID": "3"}, 1, "cuda:0"),  # srun shows each task its own alone
        (SRUN | {"SLURM_LOCALID": "3", "LOCAL_RANK": "2"}, 4, "cuda:2"),
    ],
)
def test_each_rank_of_a_machine_has_a_gpu_of_its_own(monkeypatch, environment, gpus, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with mock.patch.dict(os.environ, environment, clear=True):
        assert rank_device("cuda") == expected
        assert rank_device("cpu") == "cpu"


def test_an_attention_that_would_leave_the_soft_cap_out_is_refused(tmp_path):
    tiny_model(*TREE_FAMILIES["gemma2"]).save_pretrained(tmp_path)
    assert resolve(options_of(tmp_path)).attention == "eager"
    with refuses(UsageError, tmp_path, "model.attention"):
        resolve(options_of(tmp_path, attention="sdpa"))


def test_a_model_that_is_spread_scores_as_the_same_on_one_device(saved_llama):
    options = options_of(saved_llama, device="cpu")
    spread, whole = HfReference(replace(options, device_map="auto")), HfReference(options)
    assert spread.identity() == whole.identity()
    assert np.array_equal(spread.open().score(mixed_trees()), whole.open().score(mixed_trees()))
    with refuses(UsageError, "device_map"):
        HfReference(replace(options, device_map="nowhere")).open()
