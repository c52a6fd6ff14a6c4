"""Trainings whose peak tests/bench/memory_plan.py measured, and what the plan says of them."""

from dataclasses import dataclass

from align.pipeline.plan.memory import PlanFacts, planned
from align.pipeline.plan.workload import RowShape, even_rows
from align.schemas.config import Config, ModelOptions
from align.schemas.train_options import LoraOptions, TrainOptions
from align.stages.methods.table import objective_of

WITHIN = 0.15  # how near a plan comes to what is measured
TINY = {  # a model that is planned and trained in no time
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2000,
}


def shape(width, layers, inner, vocabulary, *, tied=False):
    """The settings of a Llama of these sizes."""
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": tied,
    }


MODELS = {
    "52M": shape(512, 6, 1536, 32_000),
    "tied 67M": shape(768, 8, 1536, 32_000, tied=True),
    "narrow": shape(256, 4, 1024, 8000),
    "wide": shape(1024, 3, 2816, 16_000),
    "many words": shape(384, 4, 1024, 100_000, tied=True),
    "deep": shape(256, 16, 768, 4000),
}


@dataclass(frozen=True)
class Case:
    """One configuration, and the bytes of tensors that were alive at its peak, in MiB."""

    peak: int
    deepspeed: str
    dtype: str = "float32"
    ranks: int = 1
    rows: int = 8  # of a micro-batch
    micro_batches: int = 2
    lora: int = 0  # rank of an adapter
    checkpointing: bool = False
    model: str = "52M"
    length: int = 64  # tokens of a prompt and of each of its two completions

    @property
    def name(self):
        words = [self.model, self.dtype, self.deepspeed, f"{self.ranks} ranks"]
        words += [f"{self.micro_batches} x {self.rows * 3 * self.length:,} tokens"]
        words += [f"LoRA {self.lora}"] if self.lora else []
        return ", ".join([*words, *(["checkpointing"] if self.checkpointing else [])])


HALF = {"dtype": "bfloat16"}
CASES = (
    Case(1171, "zero0"),
    Case(1443, "zero1"),
    Case(1560, "zero2"),
    Case(1644, "zero3"),
    Case(1174, "zero0", **HALF),
    Case(1443, "zero1", **HALF),
    Case(1345, "zero2", **HALF),
    Case(1544, "zero3", **HALF),
    Case(1076, "zero1", ranks=2),
    Case(1067, "zero2", ranks=2),
    Case(1277, "zero3", ranks=2),
    Case(1174, "zero0", ranks=2, **HALF),
    Case(960, "zero1", ranks=2, **HALF),
    Case(813, "zero2", ranks=2, **HALF),
    Case(895, "zero3", ranks=2, **HALF),
    Case(592, "zero0", lora=16),
    Case(355, "zero1", lora=16, **HALF),
    Case(348, "zero2", lora=16, ranks=2, **HALF),
    Case(453, "zero3", lora=16, ranks=2, **HALF),
    Case(1049, "zero0", checkpointing=True),
    Case(1443, "zero1", checkpointing=True, **HALF),
    Case(237, "zero1", checkpointing=True, lora=16, **HALF),
    Case(805, "zero3", checkpointing=True, ranks=2, **HALF),
    Case(1561, "zero0", rows=24, micro_batches=1),
    Case(1049, "zero0", rows=2, micro_batches=4),
    Case(1512, "zero1", rows=24, micro_batches=1, **HALF),
    Case(1136, "zero2", rows=24, micro_batches=1, ranks=2, **HALF),
    Case(1631, "zero0", model="tied 67M"),
    Case(1855, "zero1", model="tied 67M", **HALF),
    Case(1855, "zero1", model="tied 67M", checkpointing=True, rows=16, **HALF),
    # Measured once all constants of the plan were fixed.
    Case(423, "zero0", model="narrow", rows=4, length=256),
    Case(373, "zero1", model="narrow", rows=6, length=200, micro_batches=1, **HALF),
    Case(1425, "zero0", model="wide", rows=4, length=128),
    Case(1052, "zero2", model="wide", rows=12, ranks=2, **HALF),
    Case(664, "zero1", model="wide", lora=64, rows=4, length=100),
    Case(1188, "zero0", model="many words", rows=16, length=40),
    Case(1263, "zero1", model="many words", checkpointing=True, **HALF),
    Case(887, "zero0", model="deep", rows=6, length=150, micro_batches=3),
    Case(779, "zero3", model="deep", rows=4, length=180, **HALF),
    Case(411, "zero0", model="deep", lora=8, rows=8, length=90, **HALF),
    Case(1042, "zero0", model="many words", rows=6, length=90, micro_batches=1),
    Case(714, "zero2", model="many words", rows=10, ranks=2, **HALF),
)


def options_of(case):
    """The settings of a case that decide its memory."""
    train = TrainOptions(
        method="dpo",
        deepspeed=case.deepspeed,
        dtype=case.dtype,
        gradient_checkpointing=case.checkpointing,
        batch_size=case.rows * case.micro_batches * case.ranks,
        tokens_per_batch=case.rows * 3 * case.length,
    )
    return Config(train=train, lora=LoraOptions(enabled=case.lora > 0, rank=case.lora or 16))


def plan_of(case, folder):
    """What the plan says of a case whose model's config.json is in the folder."""
    config = options_of(case)
    rows = config.train.batch_size
    facts = PlanFacts(
        ModelOptions(path=str(folder)),
        case.dtype,
        objective_of("dpo", {}),
        even_rows(rows, RowShape(case.length, (case.length,) * 2), num_partners=0),
        rows=rows,
        held_out=0,
        device="cpu",
        ranks=case.ranks,
    )
    return planned(config, facts).estimate
