"""What rounds are made of: checked settings, the config of each verb, and what a round hangs on."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ..schemas.config import Config, ModelOptions, ServerOptions
from ..schemas.errors import CorruptionError, FingerprintError, UsageError
from ..schemas.json_codec import digest
from ..schemas.round_record import RoundRecord
from ..schemas.samples import Prompt, Sampler
from ..stages.judge.judge_template import load_template
from ..stages.judge.verifiers import verifier_of
from ..stages.methods.recipe import Recipe
from ..stages.methods.table import recipe_of
from ..stages.model.model_folder import model_identity, require_peft
from ..stages.storage import fs
from ..stages.storage.digest_memory import own_digests
from ..stages.storage.objects import is_remote
from ..stages.storage.rounds_folder import OneRound, RoundsFolder
from .judge import LANGUAGE
from .language_judge import judge_sampler
from .object_inputs import local_model, with_local_inputs
from .precompute_plan import require_model
from .resume import binding
from .round_prompts import PromptSplit, content_digest, split_prompts
from .settings import Settings, as_absolute
from .train_checks import require_fixed_reference

# What rounds set for each verb, and what is to be set in its place.
OWN = {
    "train.cache": "rounds.output",
    "train.model": "model.path",
    "train.output": "rounds.output",
    "train.resume": "",
    "train.other_reference": "rounds.reference",
    "cache.output": "rounds.output",
    "sample.output": "rounds.output",
    "sample.answers": "rounds.output",
    "judge.output": "rounds.output",
    "judge.answers": "rounds.output",
    "judge.against": "",
    "select.output": "rounds.output",
}
REFUSED_IN_FILES = ("train.model", "judge.against")
# Sections whose settings a round depends on, and those of them that only say where or how fast.
SECTIONS = ("tokens", "cache", "sample", "judge", "select", "rounds")
FREE = {
    *OWN,
    "cache.reuse",
    "cache.reuse_known",
    "tokens.chat_template",
    "judge.model",
    "judge.template",
    "rounds.output",
    "rounds.count",
    "rounds.min_win_rate",
    "rounds.max_length_growth",
    "rounds.show_text",
}
ALSO = ("model.dtype", "model.attention", "scoring.tokens_per_batch")
OF_SERVER = ("server.model", "server.revision")  # at whatever address


@dataclass(frozen=True)
class RoundsJob:
    """Everything that is known before the first sample."""

    settings: Settings
    config: Config  # with local copies of models and data
    folder: RoundsFolder
    recipe: Recipe
    split: PromptSplit

    @cached_property
    def first(self) -> ModelOptions:
        """The model of the beginning."""
        return self.config.model

    def policy(self, number: int) -> ModelOptions:
        """The policy that a round has trained; of round 0, the model of the beginning."""
        if number == 0:
            return self.first
        run = self.folder.round(number).run
        folder = run.merged if self.config.lora.enabled else run.model
        return replace(self.first, path=str(folder), adapter="", tensor_parallel=1)

    def reference(self, number: int) -> ModelOptions:
        """The reference of a round."""
        return self.first if self.config.rounds.reference == "fixed" else self.policy(number - 1)

    def policy_exists(self, number: int) -> bool:
        """Whether a round has trained its policy."""
        return Path(self.policy(number).path).is_dir()

    def prompts(self, number: int) -> Sequence[Prompt]:
        """The prompts of a round."""
        return self.split.of_round(number, self.config.rounds.prompts_per_round)

    def prompt_file(self, one: OneRound) -> Path:
        """The file of the prompts of a round."""
        return one.prompts if self.config.rounds.prompts_per_round else self.folder.prompts

    def sampling(self, policy: ModelOptions, prompts: Path, output: Path) -> Config:
        """To sample from a policy, in this process: a server does not have it."""
        options = replace(
            self.config.sample, output=str(output), answers=str(self.folder.sample_answers)
        )
        data = replace(self.config.data, files=[str(prompts)], map={}, carry=[])
        return replace(self.config, model=policy, data=data, sample=options, server=ServerOptions())

    def held_out_sampling(self, policy: ModelOptions, output: Path) -> Config:
        """To sample answers to the held-out prompts."""
        rounds = self.config.rounds
        config = self.sampling(policy, self.folder.held_out_prompts, output)
        options = replace(config.sample, n=rounds.eval_n, temperature=rounds.eval_temperature)
        return replace(config, sample=options)

    def judging(self, output: Path, against: str = "") -> Config:
        """To judge samples."""
        answers = str(self.folder.judgments)
        options = replace(self.config.judge, output=str(output), answers=answers, against=against)
        tokens = replace(self.config.tokens, chat_template="")  # it is the policy's
        return replace(self.config, judge=options, tokens=tokens)

    @cached_property
    def judge_sampler(self) -> Sampler | None:
        """The language model that judges: one, so that all rounds share its budget."""
        if self.config.judge.by not in LANGUAGE:
            return None
        return judge_sampler(self.judging(self.folder.root))

    def selecting(self, one: OneRound) -> Config:
        """To select rows of what was judged."""
        return replace(self.config, select=replace(self.config.select, output=str(one.selected)))

    def scoring(self, one: OneRound) -> Config:
        """To score the rows with the reference; only what no earlier cache holds is scored."""
        earlier = [str(self.folder.round(number).cache) for number in range(1, one.number)]
        kept = earlier if self.config.rounds.reference == "fixed" else []
        cache = replace(
            self.config.cache, output=str(one.cache), reuse=[*self.config.cache.reuse, *kept]
        )
        data = replace(self.config.data, files=[str(one.selected)], map={})
        return replace(self.config, model=self.reference(one.number), data=data, cache=cache)

    def training(self, one: OneRound) -> Settings:
        """To train from the last policy."""
        policy, reference = self.policy(one.number - 1), self.reference(one.number)
        is_reference = policy == reference
        train = replace(
            self.config.train,
            cache=str(one.cache),
            model="" if is_reference else policy.path,
            output=str(one.run.root),
            resume="auto",
            other_reference=not is_reference,
        )
        lora = replace(self.config.lora, merge=self.config.lora.enabled)
        config = replace(self.config, model=reference, train=train, lora=lora)
        origins = {name: of for name, of in self.settings.origins.items() if name not in OWN}
        return Settings(config, origins)

    def bound_settings(self) -> dict[str, str]:
        """The settings that every round depends on."""
        config = as_absolute(self.config)
        named = (
            name
            for name in config
            if name.partition(".")[0] in SECTIONS or name in self._also
            if name not in FREE
        )
        trained = {name: of for name, of in binding(config).items() if name not in FREE}
        return {**{name: repr(config[name]) for name in named}, **trained}

    @property
    def _also(self) -> tuple[str, ...]:
        return (*ALSO, *OF_SERVER) if self.config.server.url else ALSO

    def made_from(self, number: int, earlier: RoundRecord | None) -> dict[str, str]:
        """What a round is made from, by digest; `earlier` is the round before."""
        policy = earlier.made["model"] if earlier else self._first_digest
        is_fixed = self.config.rounds.reference == "fixed"
        return {
            "policy": policy,
            "reference": self._first_digest if is_fixed else policy,
            "prompts": content_digest(self.prompts(number)),
            "held-out prompts": content_digest(self.split.held_out),
            **self._files,
        }

    @cached_property
    def _first_digest(self) -> str:
        return digest_of_model(self.first)

    @cached_property
    def _files(self) -> dict[str, str]:
        """Digests of what settings name by a path."""
        judge, template = self.config.judge, self.config.tokens.chat_template
        texts = {"judge.template": judge.template, "tokens.chat_template": template}
        models = {"judge.model": judge.model, "rewards.model": self.config.rewards.model}
        found = {name: fs.sha256_of(Path(path)) for name, path in texts.items() if path}
        for name, path in models.items():
            if path:
                found[name] = digest_of_model(replace(self.config.model, path=path, adapter=""))
        if judge.by in {"exact", "regex", "function"}:
            columns = [*self.split.train[0].carried]
            named = verifier_of(judge, columns)[1]
            found |= {f"judge.{name}": value for name, value in named.items()}
        return found

    def require_same(self, record: RoundRecord, earlier: RoundRecord | None) -> None:
        """Refuses a finished round that was made from something else than the settings say."""
        wanted = {**self.bound_settings(), **self.made_from(record.number, earlier)}
        stored = {**record.settings, **record.made_from}
        lines = list(_differences(stored, wanted))
        if lines:
            raise FingerprintError(
                f"Round {record.number} in {self.folder.root} was made from something else. What "
                "differs:\n  " + "\n  ".join(lines) + "\nUndo the change, or choose another "
                "--output: samples of equal policies are then made again."
            )

    def require_policy(self, record: RoundRecord) -> None:
        """Refuses a model folder that is not the one that its round has left."""
        policy = self.policy(record.number)
        if digest_of_model(policy) != record.made["model"]:
            raise CorruptionError(
                f"{policy.path} is not the model that round {record.number} has trained. Restore "
                f"it from a copy, or remove {self.folder.round(record.number).record} and "
                f"{self.folder.round(record.number).run.root} to train it again."
            )


def _differences(stored: dict[str, str], wanted: dict[str, str]) -> Iterable[str]:
    for name in sorted({*stored, *wanted}):
        then, now = stored.get(name, "nothing"), wanted.get(name, "nothing")
        if then != now:
            shown = (text[:12] + "…" if len(text) == 64 else text for text in (then, now))
            yield "{}: the round has {}, now {}".format(name, *shown)


def digest_of_model(options: ModelOptions) -> str:
    """One digest of a model and its adapter."""
    return digest(model_identity(options, own_digests()))


def open_rounds(settings: Settings) -> RoundsJob:
    """Checks everything that a user can get wrong before any slow work."""
    config = settings.config
    require_model(config)
    _require_alone()
    _require_free(settings)
    recipe = _recipe(config)
    _require_judge(config)
    _require_lora(config)
    _require_evaluation(config)
    if is_remote(config.rounds.output):
        raise UsageError(
            f"{config.rounds.output}: rounds are written to a disk. Choose an --output there."
        )
    local = with_local_inputs(config)
    judge = replace(local.judge, model=local_model(local.judge.model))
    local = replace(local, judge=judge)
    job = RoundsJob(
        settings, local, RoundsFolder(Path(config.rounds.output)), recipe, split_prompts(local)
    )
    _require_measured(job)
    job.made_from(1, None)  # a model, a template or a function that is missing is found now
    _ = job.judge_sampler  # and so is a judge without a model, or a server without a revision
    return job


def _require_alone() -> None:
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError(
            "align rounds works in one process. Start it without a launcher; on several ranks "
            "give the verbs one by one: sample, judge, select, precompute-ref, train."
        )


def _require_free(settings: Settings) -> None:
    """Refuses settings that every round would override."""
    config = as_absolute(settings.config)
    for name, way in OWN.items():
        is_given = settings.origins.get(name) == "--set"
        if is_given or (name in REFUSED_IN_FILES and config[name]):
            instead = f" Set {way}." if way else " Leave it out."
            raise UsageError(
                f"{settings.origins.get(name, name)}: {name}: the rounds set it themselves."
                f"{instead}"
            )
    if config["train.eval_cache"]:
        raise UsageError(
            "train.eval_cache: each round has a cache of its own. Hold prompts out by "
            "rounds.eval_fraction."
        )
    if 0 < config["train.eval_fraction"] <= config["rounds.eval_fraction"]:
        raise UsageError(
            f"train.eval_fraction is {config['train.eval_fraction']}: by the same hash the rounds "
            f"hold out {config['rounds.eval_fraction']} of the prompts already, so it would hold "
            "out nothing. Set it to 0, or above rounds.eval_fraction."
        )


def _recipe(config: Config) -> Recipe:
    train, select = config.train, config.select
    if not train.method:
        raise UsageError("No method. Pass --method kto (or dpo, …), or set train.method.")
    require_fixed_reference(config.method)
    recipe = recipe_of(train.method, config.method)
    if recipe.head == "score":
        raise UsageError(f"{recipe.name} makes a reward model, which writes no samples.")
    if recipe.rows == "paired" and select.rows == "labels":
        raise UsageError(
            f"{recipe.name} learns from pairs, and select.rows is labels. Set it to best_worst."
        )
    if "mismatched" in recipe.needs and not config.cache.kl_pairs:
        raise UsageError(f"{recipe.name} needs mismatched completions. Set cache.kl_pairs to 1.")
    if "token_reference" in recipe.needs and not config.cache.token_logps:
        raise UsageError(
            f"{recipe.name} with these options needs the reference's log-prob of every token. Set "
            "cache.token_logps to true."
        )
    return recipe


def _require_judge(config: Config) -> None:
    judge = config.judge
    if not judge.by:
        raise UsageError(
            "No judge. Set judge.by: reward, rubric, pairwise, exact, regex or function."
        )
    if judge.by in ("rubric", "pairwise"):
        load_template(judge.by, judge.template)
    if config.server.url and judge.by not in {"rubric", "pairwise"}:
        raise UsageError(
            f"server.url is set, and judge.by is {judge.by}: in rounds a server can only be the "
            "judge, because it does not have the policy. Leave it out."
        )


def _require_lora(config: Config) -> None:
    if not config.lora.enabled:
        return
    require_peft()
    if config.model.adapter:
        raise UsageError(
            "model.adapter and lora.enabled: a new adapter on top of another one could not be "
            "loaded by others. Merge the adapter into the model first, and set model.path to that."
        )


def _require_evaluation(config: Config) -> None:
    rounds = config.rounds
    if rounds.eval_n > 1 and not rounds.eval_temperature:
        raise UsageError(
            f"rounds.eval_n is {rounds.eval_n} at rounds.eval_temperature 0, where all samples of "
            "a prompt are the same. Set eval_n to 1, or a temperature."
        )


def _require_measured(job: RoundsJob) -> None:
    rounds = job.config.rounds
    if not job.split.train:
        raise UsageError(
            f"All {len(job.split.held_out)} prompts are held out. Lower rounds.eval_fraction, or "
            "add prompts."
        )
    if not job.split.held_out and (rounds.min_win_rate or rounds.max_length_growth):
        raise UsageError(
            "rounds.min_win_rate and rounds.max_length_growth are measured on held-out prompts, "
            "and none is held out. Raise rounds.eval_fraction, or set both to 0."
        )
