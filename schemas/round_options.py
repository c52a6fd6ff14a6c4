"""The settings of sampling, judging, selecting and rounds."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from .option import STRICT, PathStr, Threshold


@dataclass(frozen=True, config=STRICT)
class ServerOptions:
    """A server with OpenAI's API, such as vLLM or SGLang."""

    url: str = Field(
        default="", description="address of the server, as http://HOST:8000/v1; empty: no server"
    )
    model: str = Field(default="", description="name of its model; empty: the only one it lists")
    revision: str = Field(
        default="",
        description="your name for its weights, under which answers are stored",
    )
    key_variable: str = Field(
        default="OPENAI_API_KEY",
        description="the environment variable that holds the API key, if the server asks",
    )
    concurrency: int = Field(default=16, ge=1, description="requests in flight")
    timeout: float = Field(
        default=120.0, gt=0, description="seconds until a request without an answer counts as lost"
    )
    retries: int = Field(
        default=8, ge=0, description="times that a request is sent again, after growing pauses"
    )
    max_tokens: int = Field(
        default=0,
        ge=0,
        description="stop, to resume later, after this many tokens read and written; 0: no limit",
    )


@dataclass(frozen=True, config=STRICT)
class SampleOptions:
    """Sampling of completions by a policy."""

    output: PathStr = Field(default="align-samples", description="folder of the samples")
    answers: PathStr = Field(
        default="", description="folder in which every answer is kept; empty: the output"
    )
    n: int = Field(default=8, ge=1, description="samples of each prompt")
    temperature: float = Field(default=1.0, ge=0, description="0: the most likely token each time")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="sample from the top tokens that add up to this"
    )
    top_k: int = Field(
        default=0, ge=0, description="sample from this many of the most likely tokens; 0: all"
    )
    max_new_tokens: int = Field(default=512, ge=1, description="most tokens of a sample")
    seed: int = Field(default=0, lt=2**63, description="random seed")


@dataclass(frozen=True, config=STRICT)
class JudgeOptions:
    """The judge of samples."""

    output: PathStr = Field(default="align-judged", description="folder of the judged samples")
    answers: PathStr = Field(
        default="", description="folder in which every judgment is kept; empty: the output"
    )
    by: Literal["none", "reward", "rubric", "pairwise", "exact", "regex", "function"] = Field(
        default="none",
        description=(
            "reward: a reward model (rewards.model); rubric or pairwise: a language model, "
            "behind a server (server.url) or in a folder (judge.model); exact or regex: a "
            "comparison with the reference answer; function: MODULE:FUNCTION"
        ),
    )
    model: PathStr = Field(default="", description="folder of a language model that judges")
    template: PathStr = Field(
        default="", description="file with the judge's prompt; empty: align's own"
    )
    function: str = Field(
        default="", description="MODULE:FUNCTION(prompt, completion, row) that returns a score"
    )
    pattern: str = Field(
        default="", description="regular expression whose first group is compared with the answer"
    )
    answer: str = Field(default="answer", description="column with the reference answer")
    against: PathStr = Field(
        default="", description="folder of other samples of the same prompts, to compare with"
    )
    pairs: Literal["all", "first"] = Field(
        default="all",
        description="which samples of a prompt are compared: all pairs, or each with the first",
    )
    max_new_tokens: int = Field(default=512, ge=1, description="most tokens of a judgment")


@dataclass(frozen=True, config=STRICT)
class SelectOptions:
    """The choice of judged samples as preference data."""

    output: PathStr = Field(default="align-selected", description="folder of the rows")
    rows: Literal["best_worst", "all_pairs", "labels", "groups"] = Field(
        default="best_worst",
        description=(
            "best_worst: one pair per prompt; all_pairs; labels: desirable or not, for KTO; "
            "groups: all samples with scores, for GRPO and PPO"
        ),
    )
    threshold: Threshold = Field(
        default="mean",
        description=(
            "labels: desirable above this, undesirable below: mean or median of a prompt, or a "
            "number"
        ),
    )
    min_gap: float = Field(
        default=0.0, ge=0, description="least difference between the scores of a pair"
    )
    max_length_ratio: float = Field(
        default=0.0,
        ge=0,
        description="the longer sample of a pair is at most this many times as long; 0: any",
    )
    keep_cut: bool = Field(
        default=False,
        description="also take samples cut at max_new_tokens; a policy learns to end there",
    )


@dataclass(frozen=True, config=STRICT)
class RoundsOptions:
    """Rounds of sample, judge, select, precompute-ref and train."""

    output: PathStr = Field(default="align-rounds", description="folder of all rounds")
    count: int = Field(default=3, ge=1, description="number of rounds; a higher one adds rounds")
    reference: Literal["fixed", "previous"] = Field(
        default="fixed",
        description="fixed: the first model; previous: the policy of the round before",
    )
    serve: str = Field(
        default="",
        description=(
            "command that starts a server to sample from, such as `vllm serve {model} --port "
            "{port}`; empty: samples are drawn in this process"
        ),
    )
    serve_timeout: float = Field(
        default=600.0, gt=0, description="seconds until that server must be ready"
    )
    prompts_per_round: int = Field(
        default=0, ge=0, description="number of fresh prompts for each round; 0: all"
    )
    eval_fraction: float = Field(
        default=0.1, ge=0, lt=1, description="share of prompts held out, by their hash"
    )
    eval_n: int = Field(
        default=1, ge=1, description="samples of each held-out prompt after each round"
    )
    eval_temperature: float = Field(default=0.0, ge=0, description="temperature of these samples")
    min_win_rate: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="stop if the win rate against the policy before is below this",
    )
    max_length_growth: float = Field(
        default=0.0,
        ge=0,
        description="stop if samples are longer than this times the first model's; 0: never",
    )
