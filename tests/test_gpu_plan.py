"""The memory that `align plan` says of one GPU, beside what PyTorch's allocator counts there."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from align.pipeline.memory_plan import MemoryPlanner, Planned
from align.schemas.config import LoraOptions, ModelOptions, TrainOptions
from align.schemas.rows import Tree
from align.stages.engine.deepspeed_engine import open_engine
from align.stages.engine.distributed import joined_world
from align.stages.model.policy import load_policy

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

SHAPE = Qwen2Config(
    hidden_size=896,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    intermediate_size=4864,
    vocab_size=151_936,
    tie_word_embeddings=True,
)
WITHIN = 0.15


@pytest.fixture(scope="module")
def half_billion(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(SHAPE, dtype=torch.bfloat16).save_pretrained(folder)
    return str(folder)


def rows():
    """32 rows of 512 tokens: 16,384."""
    random = np.random.default_rng(0)
    draw = [random.integers(0, SHAPE.vocab_size, size).astype(np.int32) for size in (200, 156, 156)]
    return [Tree(draw[0], tuple(draw[1:]))] * 32


@pytest.mark.parametrize(
    ("checkpointing", "lora"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_a_gpu_holds_what_is_planned(half_billion, checkpointing, lora):
    model = ModelOptions(path=half_billion, device="cuda")
    train = TrainOptions(deepspeed="zero1", dtype="bfloat16", gradient_checkpointing=checkpointing)
    adapter = LoraOptions(enabled=lora)
    planner = MemoryPlanner(
        Planned(
            model=model,
            train=train,
            lora=adapter,
            dtype="bfloat16",
            device="cuda",
            ranks=1,
            head="none",
            layout="flex",
            trees=rows(),
            micro_batches=2,
        )
    )
    planned = planner.components(planner.own_way)
    found = measured(model, train, adapter)
    print(f"\nplanned {planned.peak / 2**30:.2f} GiB, measured {found / 2**30:.2f}: {planned}")
    assert planned.peak == pytest.approx(found, rel=WITHIN)


def measured(model, train, adapter):
    """The most that is allocated in the third of three steps of two micro-batches."""
    with joined_world() as world:
        policy = load_policy(model, train, adapter)
        engine, _ = open_engine(policy, train, world, hidden_size=SHAPE.hidden_size)
        trees = rows()
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            for index in range(2):
                engine.learn_mode(dropout_seed=1)
                loss = -engine.forward(trees)["logps"].double().mean()
                engine.backward(loss, is_last=index == 1)
                del loss
            engine.step()
        return torch.cuda.max_memory_allocated()
