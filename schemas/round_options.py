"""The settings of sampling, judging, selecting and rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .option import option


@dataclass(frozen=True)
class ServerOptions:
    """A server with OpenAI's interface: vLLM, SGLang, llama.cpp, `transformers serve`."""

    url: str = option(
        "",
        "its address, such as http://HOST:8000/v1; empty: no server",
        flag="--server",
        on=("sample", "judge"),
    )
    model: str = option(
        "",
        "the name of its model; empty: the only one that it lists",
        flag="--server-model",
        on=("sample", "judge"),
        binds=("round",),
    )
    revision: str = option(
        "",
        "what you call these weights: a server tells no digest, so answers are kept under it",
        on=("sample", "judge"),
        binds=("round",),
    )
    key_variable: str = option(
        "OPENAI_API_KEY", "the environment variable that holds the API key, if the server asks"
    )
    concurrency: int = option(16, "requests in flight", ge=1, on=("sample", "judge"))
    timeout: float = option(120.0, "seconds without a byte until a request counts as lost", gt=0)
    retries: int = option(8, "times that one request is sent again, after growing pauses", ge=0)
    max_tokens: int = option(
        0, "stop, to go on later, once so many tokens were read and written; 0: no limit", ge=0
    )


@dataclass(frozen=True)
class SampleOptions:
    """Completions of prompts by a policy."""

    output: str = option(
        "align-samples",
        "folder of the samples",
        on=("sample",),
        is_path=True,
        binds=(),
        instead={"rounds": "rounds.output"},
    )
    answers: str = option(
        "",
        "folder that keeps every answer; empty: in the output",
        is_path=True,
        binds=(),
        instead={"rounds": "rounds.output"},
    )
    n: int = option(8, "samples of each prompt", ge=1, flag="-n", on=("sample",))
    temperature: float = option(1.0, "0: the likeliest token each time", ge=0, on=("sample",))
    top_p: float = option(
        1.0, "draw from the likeliest tokens that add up to this", gt=0, le=1, on=("sample",)
    )
    top_k: int = option(
        0, "draw from so many of the likeliest tokens; 0: all", ge=0, on=("sample",)
    )
    max_new_tokens: int = option(512, "most tokens of a sample", ge=1, on=("sample",))
    seed: int = option(0, "another seed, other samples", on=("sample",))


@dataclass(frozen=True)
class JudgeOptions:
    """Who says which samples are good, and how."""

    output: str = option(
        "align-judged",
        "folder of the judged samples",
        on=("judge",),
        is_path=True,
        binds=(),
        instead={"rounds": "rounds.output"},
    )
    answers: str = option(
        "",
        "folder that keeps every judgment; empty: in the output",
        is_path=True,
        binds=(),
        instead={"rounds": "rounds.output"},
    )
    by: Literal["none", "reward", "rubric", "pairwise", "exact", "regex", "function"] = option(
        "none",
        "reward: a reward model (rewards.model); rubric or pairwise: a language model, behind a "
        "server (server.url) or in a folder (judge.model); exact or regex: compared with the "
        "reference answer; function: MODULE:FUNCTION",
        on=("judge",),
    )
    model: str = option(
        "", "folder of a language model that judges", on=("judge",), is_path=True, binds=()
    )
    template: str = option(
        "",
        "file with the judge's prompt; empty: the one that align ships",
        on=("judge",),
        is_path=True,
        binds=(),
    )
    function: str = option(
        "", "MODULE:FUNCTION(prompt, completion, row) that returns a score", on=("judge",)
    )
    pattern: str = option(
        "", "regular expression whose first group is compared with the answer", on=("judge",)
    )
    answer: str = option("answer", "column with the reference answer", on=("judge",))
    against: str = option(
        "",
        "folder of other samples of the same prompts, to compare with",
        on=("judge",),
        is_path=True,
        binds=(),
        instead={"rounds": ""},
    )
    pairs: Literal["all", "first"] = option(
        "all",
        "which samples of a prompt are compared: all pairs, or each with the first",
        on=("judge",),
    )
    max_new_tokens: int = option(512, "most tokens of a judgment", ge=1)


@dataclass(frozen=True)
class SelectOptions:
    """Which judged samples become rows of preference data."""

    output: str = option(
        "align-selected",
        "folder of the rows",
        on=("select",),
        is_path=True,
        binds=(),
        instead={"rounds": "rounds.output"},
    )
    rows: Literal["best_worst", "all_pairs", "labels", "groups"] = option(
        "best_worst",
        "best_worst: a pair of each prompt; all_pairs; labels: desirable or not, for KTO; groups: "
        "all samples with scores, for GRPO and PPO",
        on=("select",),
    )
    threshold: float | str = option(
        "mean",
        "labels: desirable above this, undesirable below: mean or median of a prompt, or a number",
    )
    min_gap: float = option(
        0.0, "scores of a pair are further apart than this", ge=0, on=("select",)
    )
    max_length_ratio: float = option(
        0.0,
        "the longer sample of a pair is at most so many times as long; 0: any",
        ge=0,
        on=("select",),
    )
    keep_cut: bool = option(
        False,
        "also take samples cut at max_new_tokens: training would learn to end there",
        on=("select",),
    )


@dataclass(frozen=True)
class RoundsOptions:
    """Rounds of sample, judge, select, precompute-ref and train."""

    output: str = option(
        "align-rounds", "folder of all rounds", on=("rounds",), is_path=True, binds=()
    )
    count: int = option(
        3, "rounds in all; more than there are adds some", ge=1, on=("rounds",), binds=()
    )
    reference: Literal["fixed", "previous"] = option(
        "fixed",
        "fixed: the model of the beginning; previous: the policy of the round before",
        on=("rounds",),
    )
    prompts_per_round: int = option(0, "a fresh slice of so many for each round; 0: all", ge=0)
    eval_fraction: float = option(0.1, "share of prompts held out, by their hash", ge=0, lt=1)
    eval_n: int = option(1, "samples of each held-out prompt after each round", ge=1)
    eval_temperature: float = option(0.0, "of these samples", ge=0)
    min_win_rate: float = option(
        0.0,
        "stop where the win rate against the policy before falls below this",
        ge=0,
        le=1,
        binds=(),
    )
    max_length_growth: float = option(
        0.0,
        "stop where samples are longer than this times those of the beginning; 0: never",
        ge=0,
        binds=(),
    )
