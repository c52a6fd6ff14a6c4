"""What a GPU holds in memory, beside a plan and beside shorter rows."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config

from align.pipeline.plan.memory import PlanFacts, planned
from align.pipeline.plan.workload import RowShape, even_rows
from align.schemas.config import Config, ModelOptions
from align.schemas.rows import Tree
from align.schemas.train_options import LoraOptions, TrainOptions
from align.stages.engine.deepspeed_engine import open_engine
from align.stages.methods.table import objective_of
from align.stages.model.policy import Policy, load_policy
from support.live_bytes import LiveBytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # the compiler has advice for other programs
]


def require_gpu(device):
    if device != "cuda":
        pytest.fail("this measures the memory of a GPU; leave out --device cpu")


SHAPE = Qwen2Config(
    hidden_size=896,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    intermediate_size=4864,
    vocab_size=151_936,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="module")
def half_billion(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(SHAPE, dtype=torch.bfloat16).save_pretrained(folder)
    return str(folder)


# Ways to train that `auto` and its advice choose between.
RECOMPUTED = {"gradient_checkpointing": True}
WAYS = {
    "kept": {},
    "recomputed": RECOMPUTED,
    "inputs on the CPU": RECOMPUTED | {"checkpoint_offload": True},
    "zero2": {"deepspeed": "zero2"},
    "short states": RECOMPUTED | {"deepspeed": "zero2", "optimizer_dtype": "bfloat16"},
    "optimizer on the CPU": {"deepspeed": "zero2-offload"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lora", [False, True])
def test_a_gpu_holds_what_is_planned(device, lone_rank, half_billion, way, lora):
    """Compared with what PyTorch's allocator counts for 32 rows of 512 tokens."""
    require_gpu(device)
    random, shape = np.random.default_rng(0), RowShape(200, (156, 156))
    prompt, *branches = (
        random.integers(0, SHAPE.vocab_size, size).astype(np.int32)
        for size in (shape.prompt, *shape.completions)
    )
    trees = [Tree(prompt, tuple(branches))] * 32
    model = ModelOptions(path=half_billion, device="cuda")
    options = {"deepspeed": "zero1", "dtype": "bfloat16", "batch_size": 64} | WAYS[way]
    train = TrainOptions(tokens_per_batch=32 * shape.tokens, **options)
    adapter = LoraOptions(enabled=lora)
    facts = PlanFacts(
        model,
        "bfloat16",
        objective_of("dpo", {}),
        even_rows(64, shape, num_partners=0),
        rows=64,
        held_out=0,
        device="cuda",
        ranks=1,
    )
    found = planned(Config(train=train, lora=adapter), facts).estimate
    policy = load_policy(model, train, adapter)
    engine, _ = open_engine(policy, train, lone_rank, hidden_size=SHAPE.hidden_size)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        for index in range(2):
            engine.learn_mode(dropout_seed=1)
            loss = -engine.forward(trees)["logps"].double().mean()
            engine.backward(loss, is_last=index == 1)
            del loss
        engine.step()
    assert found.peak == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.15), found


LONG = LlamaConfig(
    vocab_size=16_384,
    hidden_size=128,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=65_536,
)


@pytest.mark.timeout(600)
def test_memory_grows_with_a_row_and_not_with_its_square(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    policy = Policy(LlamaForCausalLM(LONG).to(device, dtype))
    assert policy.path.layout == ("flex" if device == "cuda" else "packed")

    def learn(length):
        """Learns one row; half of it is the prompt."""
        drawn = np.random.default_rng(0).integers(3, LONG.vocab_size, (2, length // 2), "int32")
        policy((Tree(drawn[0], (drawn[1],)),)).sum().backward()

    def peak(length):
        """The peak in bytes while one row is learned."""
        if device == "cpu":
            with LiveBytes() as live:
                learn(length)
            return live.most
        torch.cuda.reset_peak_memory_stats()
        learn(length)
        return torch.cuda.max_memory_allocated()

    peak(4096)  # gradients of the weights stay
    # A byte for each pair of 32k tokens would be 1,024 MiB, and their logits 2,048 in float32.
    assert peak(32_768) - peak(4096) < 512 * 2**20
