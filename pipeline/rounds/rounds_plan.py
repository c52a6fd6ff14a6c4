"""Plan of the rounds: the config of each verb, and the digests a round depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ...schemas.config import Config, ModelOptions
from ...schemas.errors import CorruptionError, FingerprintError, differences
from ...schemas.json_codec import digest
from ...schemas.round_options import ServerOptions
from ...schemas.round_record import RoundRecord
from ...schemas.samples import Prompt, Sampler
from ...stages.methods.recipe import Recipe
from ...stages.model.model_folder import model_identity
from ...stages.storage.disk import fs
from ...stages.storage.disk.digests import own_digests
from ...stages.storage.run.rounds_folder import OneRound, RoundsFolder
from ..options.settings import Settings, as_absolute
from ..options.table import INSTEAD, bound
from ..tables.judges import kind_of
from ..tables.language_judge import judge_sampler
from .round_prompts import PromptSplit, content_digest


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
        return replace(self.first, path=str(folder), adapter="")

    def reference(self, number: int) -> ModelOptions:
        """The reference of a round."""
        return self.first if self.config.rounds.reference == "fixed" else self.policy(number - 1)

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
        if not kind_of(self.config.judge).asks:
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
        given, own = self.settings.origins, INSTEAD["rounds"]
        origins = {name: origin for name, origin in given.items() if name not in own}
        return Settings(config, origins)

    def bound_settings(self) -> dict[str, str]:
        """The settings that every round depends on."""
        return {
            name: value
            for name, value in bound(as_absolute(self.config), "round").items()
            if self.config.server.url or not name.startswith("server.")
        }

    def made_from(self, number: int, earlier: RoundRecord | None) -> dict[str, str]:
        """The digests of a round's inputs; `earlier` is the round before."""
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
        named = kind_of(judge).named(judge, [*self.split.train[0].carried])
        return found | {f"judge.{name}": value for name, value in named.items()}

    def require_same(self, record: RoundRecord, earlier: RoundRecord | None) -> None:
        """Refuses a finished round that was made from something else than the settings say."""
        wanted = {**self.bound_settings(), **self.made_from(record.number, earlier)}
        stored = {**record.settings, **record.made_from}
        lines = differences(stored, wanted, had="the round has").values()
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


def digest_of_model(options: ModelOptions) -> str:
    """One digest of a model and its adapter."""
    return digest(model_identity(options, own_digests()))
