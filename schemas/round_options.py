"""The settings of servers, sampling, judging, selection and rounds."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from .option import STRICT, PathStr, Threshold


@dataclass(frozen=True, config=STRICT)
class ServerOptions:
    """A server with OpenAI's API, such as vLLM or SGLang."""

    url: str = Field(
        default="",
        description="address of the server, such as http://HOST:8000/v1; empty: no server",
    )
    model: str = Field(
        default="", description="name of the model; empty: the only one on the server"
    )
    revision: str = Field(
        default="",
        description="your name for the server's weights; answers are stored under it",
    )
    key_variable: str = Field(
        default="OPENAI_API_KEY",
        description="environment variable with the API key, if the server needs one",
    )
    concurrency: int = Field(default=16, ge=1, description="requests in flight")
    timeout: float = Field(
        default=120.0, gt=0, description="seconds until a request without an answer counts as lost"
    )
    retries: int = Field(
        default=8, ge=0, description="number of times a failed request is repeated"
    )
    max_tokens: int = Field(
        default=0,
        ge=0,
        description=(
            "stop after this many tokens read and written; the same command resumes; 0: no limit"
        ),
    )


@dataclass(frozen=True, config=STRICT)
class SampleOptions:
    """Sampling of completions by a policy."""

    output: PathStr = Field(default="align-samples", description="folder of the samples")
    answers: PathStr = Field(
        default="", description="folder that stores every answer; empty: in the output folder"
    )
    n: int = Field(default=8, ge=1, description="samples of each prompt")
    temperature: float = Field(default=1.0, ge=0, description="sampling temperature; 0: greedy")
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="sample from the most likely tokens whose probabilities add up to this",
    )
    top_k: int = Field(
        default=0, ge=0, description="sample from this many of the most likely tokens; 0: all"
    )
    max_new_tokens: int = Field(default=512, ge=1, description="most tokens of a sample")
    seed: int = Field(default=0, lt=2**63, description="random seed")


@dataclass(frozen=True, config=STRICT)
class JudgeOptions:
    """Judging of samples."""

    output: PathStr = Field(default="align-judged", description="folder of the judged samples")
    answers: PathStr = Field(
        default="", description="folder that stores every judgment; empty: in the output folder"
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
        default="", description="file with the template of the judge's prompt; empty: align's own"
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
        description="samples of a prompt to compare: all pairs, or each with the first",
    )
    max_new_tokens: int = Field(default=512, ge=1, description="most tokens of a judgment")


@dataclass(frozen=True, config=STRICT)
class SelectOptions:
    """Selection of preference data from judged samples."""

    output: PathStr = Field(default="align-selected", description="folder of the rows")
    rows: Literal["best_worst", "all_pairs", "labels", "groups"] = Field(
        default="best_worst",
        description=(
            "best_worst: one pair per prompt; all_pairs: every pair of a prompt; labels: desirable "
            "or not, for KTO; groups: all samples with scores, for GRPO and PPO"
        ),
    )
    threshold: Threshold = Field(
        default="mean",
        description=(
            "for labels: scores above it are desirable, below it undesirable: mean or median of "
            "the prompt's scores, or a number"
        ),
    )
    min_gap: float = Field(
        default=0.0, ge=0, description="smallest difference between the scores of a pair"
    )
    max_length_ratio: float = Field(
        default=0.0,
        ge=0,
        description="largest ratio of the longer to the shorter sample of a pair; 0: no limit",
    )
    keep_cut: bool = Field(
        default=False,
        description="keep samples cut at max_new_tokens, from which a policy learns to stop early",
    )


@dataclass(frozen=True, config=STRICT)
class RoundsOptions:
    """Rounds that sample, judge, select, precompute log-probs and train."""

    output: PathStr = Field(default="align-rounds", description="folder of all rounds")
    count: int = Field(default=3, ge=1, description="number of rounds; a higher one adds rounds")
    reference: Literal["fixed", "previous"] = Field(
        default="fixed",
        description="fixed: the first model; previous: the policy of the previous round",
    )
    serve: str = Field(
        default="",
        description=(
            "command that starts a server to sample from, such as `vllm serve {model} --port "
            "{port}`; empty: samples are drawn in this process"
        ),
    )
    serve_timeout: float = Field(
        default=600.0, gt=0, description="seconds to wait until that server is ready"
    )
    prompts_per_round: int = Field(
        default=0, ge=0, description="number of fresh prompts for each round; 0: all"
    )
    eval_fraction: float = Field(
        default=0.1, ge=0, lt=1, description="share of prompts held out, chosen by their hash"
    )
    eval_n: int = Field(
        default=1, ge=1, description="samples of each held-out prompt after each round"
    )
    eval_temperature: float = Field(default=0.0, ge=0, description="temperature of these samples")
    min_win_rate: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="stop if the win rate against the previous policy is below this",
    )
    max_length_growth: float = Field(
        default=0.0,
        ge=0,
        description="stop if samples are more than this many times as long as at first; 0: never",
    )
