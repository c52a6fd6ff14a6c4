import shutil

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from align.stages.demo.preferences import draw_preferences, paired
from support.families import saved_adapter, tiny_model
from support.ranks import seen_in
from support.training_ranks import ALONE, DEVICES, EXPERTS, SPREAD, TROUBLE
from support.training_world import scored

MIXTURE = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}


@pytest.fixture(scope="session")
def mixture_cache(tokenizer_folder, tmp_path_factory):
    """A cache of pairs that a mixture of experts scored."""
    folder = tmp_path_factory.mktemp("mixture")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    vocabulary = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    tiny_model("qwen3_moe", MIXTURE | vocabulary).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    pq.write_table(paired(list(draw_preferences(48, seed=1))), folder / "pairs.parquet")
    return scored(folder, "pairs", kl_pairs=0)


@pytest.fixture(scope="session")
def continued_cache(training_world, tmp_path_factory):
    """A cache of a reference with an adapter, which the policy trains further."""
    folder = tmp_path_factory.mktemp("continued")
    shutil.copy(training_world.folder / "pairs.parquet", folder)
    shape = {"target_modules": ["q_proj", "down_proj"], "rank_pattern": {"down_proj": 2}}
    adapter = saved_adapter(folder / "adapter", training_world.model, **shape)
    return scored(folder, "pairs", kl_pairs=1, model=training_world.model, adapter=adapter)


@pytest.fixture(scope="session")
def launch(server, tmp_path_factory, training_world, mixture_cache, continued_cache):
    """Runs cases in worlds of ranks; returns the results of each rank."""
    caches = {name: getattr(training_world, name) for name in ("pairs", "labels", "everything")}
    caches |= {"experts": mixture_cache, "continued": continued_cache}

    def launched(device="cpu", **worlds):
        root = tmp_path_factory.mktemp("ranks")
        seen = seen_in(server, root, caches, device=device, **worlds)
        return {name: one.ranks for name, one in seen.items()}

    return launched


@pytest.fixture(scope="session")
def worlds(launch):
    """The results of one process, of two ranks, and of one process on the pretended device."""
    trouble = [*(f"nonfinite/{kind}" for kind in TROUBLE), "stop reasons"]
    return launch(alone=(1, *ALONE), spread=(2, *SPREAD, *trouble), devices=(1, *DEVICES))


@pytest.fixture(scope="session")
def alone(worlds):
    return worlds["alone"][0]


@pytest.fixture(scope="session")
def spread(worlds):
    return worlds["spread"]


@pytest.fixture(scope="session")
def devices(worlds):
    return worlds["devices"][0]
