"""Checks the settings and inputs of rounds before the first sample is drawn."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...schemas.config import Config, ModelOptions
from ...schemas.errors import UsageError
from ...schemas.json_codec import digest
from ...schemas.samples import Prompt, Sampler
from ...stages.judge.verifiers import load_verifier
from ...stages.methods.objective import Objective
from ...stages.model.model_folder import model_identity, require_peft
from ...stages.server.policy_server import server_command
from ...stages.storage.disk import fs
from ...stages.storage.disk.digests import own_digests
from ...stages.storage.locations import require_on_disk
from ...stages.storage.run.run_folder import RunFolder
from ..jobs.object_inputs import local_model, with_local_inputs
from ..options.first_checks import asked_objective
from ..options.settings import Settings, as_absolute, changed
from ..options.settings_table import INSTEAD, settings_to_match
from ..plan.cache_checks import require_own_samples
from ..precompute.opening import require_model
from ..tables.judge import CHECKS, LANGUAGE, require_judge
from ..tables.judges import ADDED
from ..tables.language_judge import judge_sampler
from ..tables.samplers import require_openai, sampling_of
from .round_prompts import split_prompts


@dataclass(frozen=True)
class Rounds:
    """The checked settings and inputs of all rounds."""

    root: Path
    config: Config  # with local copies of models and data; each step changes its own settings
    origins: dict[str, str]  # where the values of the config come from
    prompts: Sequence[Prompt]  # to train on
    held_out: Sequence[Prompt]
    must_match: Mapping[str, str]  # settings and digests that every round depends on
    sampler: Sampler | None  # the judge's language model, shared because its budget is

    def folder(self, number: int) -> Path:
        """The folder of a round; round 0 is the first model."""
        return self.root / f"round-{number:03d}"

    def policy(self, number: int) -> ModelOptions:
        """The policy that a round trained; for round 0, the first model."""
        if number == 0:
            return self.config.model
        run = RunFolder(self.folder(number) / "run")
        folder = run.merged if self.config.lora.enabled else run.model
        return replace(self.config.model, path=str(folder), adapter="")


def open_rounds(settings: Settings) -> Rounds:
    """Reads the prompts, and refuses wrong settings before any slow work."""
    require_model(settings.config)
    _require_settings(settings.config, asked_objective(settings.config))
    root = require_on_disk(settings.config.rounds.output, "rounds are")

    config = with_local_inputs(settings.config)
    judges = {"judge.model": config.judge.model, "rewards.model": config.rewards.model}
    config = changed(config, {name: local_model(one) for name, one in judges.items()})
    prompts, held_out = split_prompts(config)
    if not prompts:
        raise UsageError(
            f"All {len(held_out)} prompts are held out. Lower rounds.eval_fraction, or add prompts."
        )
    if not held_out and (config.rounds.min_win_rate or config.rounds.max_length_growth):
        raise UsageError(
            "rounds.min_win_rate and rounds.max_length_growth are measured on held-out prompts, "
            "and none is held out. Raise rounds.eval_fraction, or set both to 0."
        )
    carried = [*dict.fromkeys(name for one in (*prompts, *held_out) for name in one.carried)]
    if taken := [name for name in ADDED if name in carried]:
        raise UsageError(
            f"data.files: the prompts have a column {taken[0]!r}, which judging adds. Rename it."
        )
    must_match = _values_to_match(config, prompts, held_out, carried)
    own = {
        "data.map": {},
        "sample.answers": str(root / "answers" / "samples"),
        "judge.answers": str(root / "answers" / "judgments"),
        "lora.start": "merge",
        "lora.merge": config.lora.enabled,
        "train.resume": "auto",
    }
    config = changed(config, own)
    sampler = None
    if config.judge.by in LANGUAGE:
        sampler = judge_sampler(changed(config, {"tokens.chat_template": ""}))
    ignored = INSTEAD["rounds"]
    origins = {name: one for name, one in settings.origins.items() if name not in ignored}
    return Rounds(root, config, origins, prompts, held_out, must_match, sampler)


def _require_settings(config: Config, objective: Objective) -> None:
    """Refuses settings that are wrong with any data."""
    train, rounds, cache, lora = config.train, config.rounds, config.cache, config.lora
    require_judge(config)
    if rounds.serve:
        server_command(rounds.serve, "MODEL", 0)
        require_openai()
    if lora.enabled:
        require_peft()
    distribution = sampling_of(config.sample).distribution
    require_own_samples(objective, "the rounds", [distribution], may_differ=train.other_sampling)
    needs, method = objective.needs, objective.name
    for is_wrong, message in (
        (
            os.environ.get("WORLD_SIZE", "1") != "1",
            "align rounds runs in one process. Start it without a launcher, or run its steps as "
            "single commands.",
        ),
        (train.model, "train.model is set by rounds. Leave it out."),
        (config.judge.against, "judge.against is set by rounds. Leave it out."),
        (
            train.eval_cache,
            "train.eval_cache is of one cache, and each round has its own. Use "
            "rounds.eval_fraction.",
        ),
        (
            0 < train.eval_fraction <= rounds.eval_fraction,
            "train.eval_fraction holds out no row, because rounds.eval_fraction "
            f"({rounds.eval_fraction}) has removed these prompts by the same hash. Set it to 0, "
            f"or above {rounds.eval_fraction}.",
        ),
        (
            rounds.eval_n > 1 and not rounds.eval_temperature,
            "rounds.eval_n is above 1, and at rounds.eval_temperature 0 all samples of a prompt "
            "are equal. Raise the temperature, or set rounds.eval_n to 1.",
        ),
        (
            config.server.url and config.judge.by not in LANGUAGE,
            f"server.url is the judge's server in rounds, and judge.by is {config.judge.by}. "
            "Leave it out; rounds.serve starts a server of the policy.",
        ),
        (
            config.model.adapter and (lora.enabled or rounds.serve),
            "model.adapter cannot be used with lora.enabled or rounds.serve. Merge the adapter "
            "into the model, and set model.path to the merged model.",
        ),
        (
            objective.head == "score",
            f"{method} trains a reward model, which cannot sample. Choose another method.",
        ),
        (
            objective.rows == "paired" and config.select.rows == "labels",
            f"{method} learns from pairs, and select.rows is labels. Set it to best_worst.",
        ),
        ("mismatched" in needs and not cache.kl_pairs, f"{method} needs cache.kl_pairs=1. Set it."),
        ("reference" in needs and not cache.scored, f"{method} needs cache.scored=true. Set it."),
        (
            "token_reference" in needs and not cache.token_logps,
            f"{method} with these options needs cache.token_logps=true. Set it.",
        ),
    ):
        if is_wrong:
            raise UsageError(message)


def _values_to_match(
    config: Config,
    prompts: Sequence[Prompt],
    held_out: Sequence[Prompt],
    carried: Sequence[str],
) -> dict[str, str]:
    """The settings that every round depends on, and digests of the files that they name.

    Reading the files also refuses a missing model, template or function.
    """
    values = settings_to_match(as_absolute(config), "round")
    if not config.server.url:
        values = {name: value for name, value in values.items() if not name.startswith("server.")}
    judge, template = config.judge, config.tokens.chat_template
    texts = {"judge.template": judge.template, "tokens.chat_template": template}
    values |= {name: fs.sha256_of(Path(path)) for name, path in texts.items() if path}
    values["model"] = digest_of_model(config.model)
    models = {"judge.model": judge.model, "rewards.model": config.rewards.model}
    for name, path in models.items():
        if path:
            values[name] = digest_of_model(replace(config.model, path=path, adapter=""))
    if judge.by in CHECKS:
        _, identity = load_verifier(judge, carried)
        values |= {f"judge.{name}": value for name, value in identity.items()}
    for name, side in (("prompts", prompts), ("held-out prompts", held_out)):
        values[name] = digest([[one.key, repr(sorted(one.carried.items()))] for one in side])
    return values


def digest_of_model(options: ModelOptions) -> str:
    """The digest of a model with its adapter."""
    return digest(model_identity(options, own_digests()))
