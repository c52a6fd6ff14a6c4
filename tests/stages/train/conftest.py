import json

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from align.stages.demo.preferences import draw_preferences, paired
from support.families import tiny_model
from support.programs import run_ranks
from support.training_ranks import ALONE, EXPERTS, SPREAD, run_cases
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
    """Pairs, as a mixture of experts thinks of them."""
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
    for stage in (0, 3):  # no parameter is so small that every rank keeps the whole of it
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        (folder / f"zero{stage}.json").write_text(json.dumps({"zero_optimization": zero}))
    return scored(folder, "pairs", kl_pairs=0)


@pytest.fixture(scope="session")
def launch_training(tmp_path_factory, training_world, mixture_cache):
    """Trains in so many processes, of which one is this; gives what each of them wrote down."""
    caches = {"experts": mixture_cache}
    caches |= {name: getattr(training_world, name) for name in ("pairs", "labels", "everything")}

    def launch(size, names):
        if size == 1:
            return [json.loads(run_cases(caches, names)[0])]
        folder = tmp_path_factory.mktemp(f"training-{size}")
        words = [f"{name}={path}" for name, path in caches.items()]
        return run_ranks("training_ranks", folder, *words, *names, ranks=size).ranks

    return launch


@pytest.fixture(scope="session")
def alone(launch_training):
    """What one process saw."""
    return launch_training(1, ALONE)


@pytest.fixture(scope="session")
def spread(launch_training):
    """What each of two processes saw."""
    return launch_training(2, SPREAD)
