"""The option names of other trainers, and the settings that are meant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from ...schemas.option import COMMANDS
from .declared import declared, facts_of, flag_of, reads

TRL, AXOLOTL, OPENRLHF, FACTORY = "TRL", "axolotl", "OpenRLHF", "LLaMA-Factory"
HF = (TRL, AXOLOTL, FACTORY)  # all three take the names of transformers' TrainingArguments
EVERY = (TRL, AXOLOTL, OPENRLHF, FACTORY)


@dataclass(frozen=True)
class TheirName:
    """One option under all of its names, and what it is here."""

    names: tuple[str, ...]
    tools: tuple[str, ...]
    settings: tuple[str, ...]  # empty: nothing is to be set
    note: str  # where the meaning differs, in sentences


def _is(names: str, tools: tuple[str, ...] | str, settings: str, note: str = "") -> TheirName:
    """A line of the table; names and settings are separated by spaces."""
    listed = (tools,) if isinstance(tools, str) else tools
    return TheirName(tuple(names.split()), listed, tuple(settings.split()), note)


_BATCH = (
    "It is the global batch: rows per device x accumulation steps x GPUs. The micro-batch is "
    "train.tokens_per_batch, in tokens, and changes only memory and speed."
)
_MICRO = (
    "A micro-batch is counted in tokens here, and changes only memory and speed. The global batch "
    "is train.batch_size: rows per device x accumulation steps x GPUs."
)
_NO_STEPS = "Accumulation needs no setting: train.batch_size is what all of it adds up to."
_REFERENCE = "`align precompute-ref` runs the reference; the policy begins as it."
_AT_ONCE = "Both stages cut rows when the cache is made, by `align precompute-ref`."
_LOSSES = (
    "`align methods` lists them. sigmoid is dpo, kto_pair is kto, exo_pair is exo, nca_pair is "
    "nca, sppo_hard is sppo, sigmoid_norm is dpo_norm; the others have the same name. Several "
    "with weights are one method: dpo:0.8+bco_pair:0.2."
)
_MEAN = "Every mean is over the global batch, so a batch may be dealt in any way."
_ALWAYS = "Nothing needs to be set: it is always so."
_EPOCHS = "Several passes read the same cache; the reference is not run again."
_WARMUP = "Below 1 it is a share of all steps, else a number of steps."
_TRACKERS = "Names with commas between; without it runs are recorded in MLflow."
_LIKE_NO_OTHER = "A share of the prompts is held out, chosen by their hash; 0 holds out none."

TABLE = (
    # The model and the data.
    _is("model_name_or_path base_model pretrain model.model_name_or_path", EVERY, "model.path",
        _REFERENCE + " Another policy is train.model."),
    _is("ref_model ref_pretrain ref.model_name_or_path", EVERY, "model.path",
        _REFERENCE + " Where the policy is another model, that one is train.model, with "
        "train.other_reference=true."),
    _is("adapter_name_or_path lora_model_dir", (AXOLOTL, FACTORY), "model.adapter",
        "It is read with the reference; a training always begins a new adapter."),
    _is("ref_offload ref.offload", OPENRLHF, "", "A training holds no reference model."),
    _is("torch_dtype", TRL, "model.dtype", "Of the reference; the policy's is train.dtype."),
    _is("trust_remote_code", HF, "model.trust_remote_code"),
    _is("attn_implementation flash_attn", EVERY, "model.attention",
        "auto takes FlexAttention on a GPU where it is true to the model."),
    _is("dataset dataset_name datasets data.dataset", EVERY, "data.files",
        "They are the arguments of `align precompute-ref`: files or folders on this machine."),
    _is("dataset_probs prompt_data_probs interleave_probs data.dataset_probs",
        (OPENRLHF, FACTORY), "train.file_weights",
        "Not the probability of a file, but how often an epoch draws each of its rows."),
    _is("eval_dataset test_datasets eval.dataset", EVERY, "train.eval_cache",
        "Another cache, made of these files; train.eval_fraction holds out a part instead."),
    _is("val_set_size val_size", (AXOLOTL, FACTORY), "train.eval_fraction", _LIKE_NO_OTHER),
    _is("prompt_key input_key output_key chosen_key rejected_key label_key data.prompt_key "
        "data.chosen_key data.rejected_key", OPENRLHF, "data.map",
        "Such as --map prompt=YOURS, chosen, rejected, completion or label."),
    _is("apply_chat_template data.apply_chat_template", OPENRLHF, "data.wrap",
        "Conversations are templated always; plain text where data.wrap is chat."),
    _is("input_template data.input_template", OPENRLHF, "",
        "Write the template into the prompts, or let the tokenizer's chat template do it."),
    _is("chat_template chat_template_jinja data.tokenizer_chat_template template",
        (AXOLOTL, OPENRLHF, FACTORY), "tokens.chat_template",
        "A Jinja file in place of the tokenizer's own template."),
    _is("dataset_num_proc preprocessing_num_workers dataset_processes", HF, "data.workers"),
    _is("max_length max_len sequence_len cutoff_len data.max_len", EVERY, "tokens.max_length",
        _AT_ONCE + " 2,048 unless set; TRL's default is 1,024."),
    _is("max_prompt_length max_prompt_len", (TRL, AXOLOTL), "tokens.max_prompt_length", _AT_ONCE),
    _is("truncation_mode", TRL, "tokens.prompt_side",
        "keep_end is left, the default: prompts lose their start, completions their end."),
    # The method.
    _is("loss_type pref_loss rl stage", HF, "train.method", _LOSSES),
    _is("loss_weights", TRL, "train.method", _LOSSES),
    _is("ipo model.ipo_enable", OPENRLHF, "train.method",
        "With method.normalize=sum: OpenRLHF compares sums, the default here means."),
    _is("beta pref_beta rl_beta model.beta", EVERY, "method.beta",
        "Of ORPO it is method.lam (orpo_alpha in axolotl)."),
    _is("orpo_alpha", AXOLOTL, "method.lam", "Of orpo."),
    _is("label_smoothing dpo_label_smoothing model.label_smoothing", EVERY,
        "method.label_smoothing"),
    _is("desirable_weight kto_desirable_weight kto_chosen_weight desirable_loss_weight", EVERY,
        "method.desirable_weight", "auto makes both labels as heavy."),
    _is("undesirable_weight kto_undesirable_weight kto_rejected_weight undesirable_loss_weight",
        EVERY, "method.undesirable_weight", "auto makes both labels as heavy."),
    _is("rpo_alpha pref_ftx nll_loss_coef model.nll_loss_coef", EVERY, "method.sft_weight"),
    _is("cpo_alpha", (TRL, AXOLOTL), "method.alpha", "Of cpo."),
    _is("simpo_gamma", HF, "method.gamma_ratio", "It is gamma divided by beta."),
    _is("f_divergence_type", TRL, "method.f_divergence",
        "reverse_kl, forward_kl, js or alpha."),
    _is("f_alpha_divergence_coef", TRL, "method.f_alpha"),
    _is("use_weighting dpo_use_weighting", (TRL, AXOLOTL), "method.wpo"),
    _is("ld_alpha", (TRL, FACTORY), "method.ld_alpha",
        "It needs a cache made with --token-logps."),
    _is("discopop_tau", TRL, "method.tau"),
    _is("kl_coef init_kl_coef", (TRL, OPENRLHF), "method.kl",
        "Of ppo; of grpo the distance from the reference weighs method.beta."),
    _is("cliprange eps_clip", (TRL, OPENRLHF), "method.epsilon", "Of ppo and grpo."),
    _is("vf_coef", TRL, "method.vf", "Of ppo."),
    _is("precompute_ref_log_probs", TRL, "", _ALWAYS),
    _is("precompute_ref_batch_size", TRL, "scoring.tokens_per_batch", "In tokens, not rows."),
    _is("sync_ref_model", TRL, "",
        "The reference of a cache does not move; `align rounds` takes the last round's policy."),
    # Batches and the length of a training.
    _is("per_device_train_batch_size", HF, "train.batch_size", _BATCH),
    _is("train_batch_size train.batch_size batch_size", (AXOLOTL, OPENRLHF), "train.batch_size",
        _MEAN),
    _is("micro_batch_size micro_train_batch_size train.micro_batch_size", (AXOLOTL, OPENRLHF),
        "train.tokens_per_batch", _MICRO),
    _is("gradient_accumulation_steps", HF, "train.batch_size",
        _NO_STEPS),
    _is("per_device_eval_batch_size eval_batch_size", HF, "train.tokens_per_batch",
        "Evaluations take the micro-batch of the training."),
    _is("num_train_epochs num_epochs max_epochs train.max_epochs", EVERY, "train.epochs", _EPOCHS),
    _is("max_samples", (OPENRLHF, FACTORY), "train.max_steps",
        "A number of optimizer steps; for fewer rows, give `align precompute-ref` a smaller file."),
    _is("seed", EVERY, "train.seed", "cache.seed orders the rows and draws KTO's partners."),
    # The optimizer.
    _is("learning_rate adam.lr", EVERY, "train.lr"),
    _is("lr_scheduler_type lr_scheduler", EVERY, "train.schedule",
        "constant, linear or cosine; where it ends is train.min_lr."),
    _is("warmup_ratio warmup_steps lr_warmup_ratio", EVERY, "train.warmup", _WARMUP),
    _is("min_lr_ratio cosine_min_lr_ratio", (AXOLOTL, OPENRLHF), "train.min_lr",
        "A share of train.lr."),
    _is("optim", (TRL, FACTORY), "train.optimizer",
        "adamw_torch is adamw; lion, adafactor, muon and adamw8bit are there too."),
    _is("l2 adam.weight_decay", OPENRLHF, "train.weight_decay"),
    _is("adam_beta1", HF, "train.beta1"),
    _is("adam_beta2", HF, "train.beta2"),
    _is("adam_betas adam.betas", OPENRLHF, "train.beta1 train.beta2",
        "0.9 and 0.999 unless set; OpenRLHF's are 0.9 and 0.95."),
    _is("adam_epsilon adam.eps", EVERY, "train.epsilon"),
    _is("max_norm", OPENRLHF, "train.max_grad_norm"),
    _is("disable_dropout", TRL, "train.dropout", "The other way round: off unless it is true."),
    _is("router_aux_loss_coef aux_loss_coef output_router_logits", (TRL, OPENRLHF),
        "train.router_loss", "It is taken over the whole step."),
    # Memory, precision and many GPUs.
    _is("bf16 fp16 bfloat16 float16 pure_bf16 ds.param_dtype", EVERY, "train.dtype",
        "bfloat16 or float16; what accumulates is float32."),
    _is("grad_accum_dtype ds.grad_accum_dtype", OPENRLHF, "", "Gradients accumulate in float32."),
    _is("zero_stage ds.zero_stage", OPENRLHF, "train.deepspeed",
        "zero0 to zero3, or a DeepSpeed JSON file."),
    _is("adam_offload ds.adam_offload", OPENRLHF, "train.deepspeed",
        "zero2-offload or zero3-offload."),
    _is("fsdp fsdp_config", HF, "train.deepspeed", "zero3 spreads the policy as FSDP does."),
    _is("packing sample_packing padding_free packing_samples neat_packing ds.packing_samples",
        EVERY, "", "Nothing needs to be set: the completions of a prompt share a sequence, and "
        "rows of like length a batch."),
    _is("group_by_length train_sampling_strategy", HF, "",
        "Rows are shuffled, those of like length share a micro-batch, and KTO's partners do not "
        "depend on the order."),
    _is("gradient_checkpointing", EVERY, "train.gradient_checkpointing",
        "Off unless set; TRL's is on."),
    _is("ring_attn_size ds.ring_attn_size sequence_parallel_degree", (AXOLOTL, OPENRLHF),
        "train.sequence_parallel"),
    _is("tensor_parallel_size ds.tensor_parallel_size", OPENRLHF, "model.tensor_parallel",
        "Of the reference, while its cache is made; --deepspeed zero3 spreads the policy."),
    # Adapters.
    _is("use_peft finetuning_type peft_config", (TRL, FACTORY), "lora.enabled"),
    _is("lora_r lora_rank ds.lora.rank", EVERY, "lora.rank",
        "With --lora, which turns the adapter on."),
    _is("lora_alpha ds.lora.alpha", EVERY, "lora.alpha"),
    _is("lora_dropout ds.lora.dropout", EVERY, "lora.dropout",
        "It needs train.dropout=true as well."),
    _is("lora_target_modules lora_target target_modules ds.lora.target_modules "
        "lora_target_linear", EVERY, "lora.targets", "Empty is all linear layers."),
    _is("load_in_4bit quantization_bit ds.load_in_4bit", EVERY, "lora.quantize", "nf4."),
    _is("merge_lora", AXOLOTL, "lora.merge"),
    # Evaluations, checkpoints and records.
    _is("eval_steps eval_strategy evals_per_epoch eval.steps", EVERY, "train.eval_every",
        "In optimizer steps; rows are held out by train.eval_fraction or train.eval_cache."),
    _is("save_steps save_strategy saves_per_epoch ckpt.save_steps", EVERY, "train.save_every",
        "In optimizer steps; one is saved by time as well (train.save_minutes)."),
    _is("save_total_limit max_ckpt_num ckpt.max_num", EVERY, "train.keep_last",
        "Of the best ones train.keep_best is kept besides."),
    _is("metric_for_best_model greater_is_better", HF, "train.best",
        "The name of a metric, such as eval/loss; -NAME where the lowest is the best, +NAME the "
        "highest."),
    _is("load_best_model_at_end", HF, "train.write_best", "By the metric of train.best."),
    _is("early_stopping_patience early_stopping_steps", HF, "train.patience",
        "In evaluations, by the metric of train.best. The model is that of the last step, unless "
        "train.write_best is true."),
    _is("early_stopping_threshold", HF, "train.min_delta"),
    _is("resume_from_checkpoint auto_resume_from_checkpoints load_checkpoint ckpt.load_enable",
        EVERY, "train.resume", "auto continues from the newest checkpoint."),
    _is("output_dir save_path ckpt_path ckpt.output_dir", EVERY, "train.output",
        "The folder of the run; the model is in its folder model. A cache has cache.output."),
    _is("overwrite_output_dir", FACTORY, "", "A finished run is never written over: name another."),
    _is("logging_steps", EVERY, "train.log_every"),
    _is("report_to use_wandb use_mlflow use_tensorboard", EVERY, "tracking.trackers",
        _TRACKERS),
    _is("mlflow_tracking_uri", AXOLOTL, "tracking.uri"),
    _is("mlflow_experiment_name wandb_project", EVERY, "tracking.experiment"),
    _is("run_name mlflow_run_name wandb_run_name", EVERY, "tracking.run_name"),
)  # fmt: skip


def meaning_of(name: str) -> str:
    """What another tool's name is here, in sentences; empty for a setting, and for no tool's name.

    So is a setting of ours that is given without its section, or in another one.
    """
    section, _, key = name.partition(".")
    if name in declared() or name in _sections() or (section == "method" and _is_option(key)):
        return ""
    their, settings = _found(name)
    return _told(name, settings, their)


def meaning_of_flag(flag: str, command: str) -> str:
    """The same of a flag that a command does not have, and how to give the setting."""
    their, settings = _found(flag.lstrip("-").replace("-", "_"))
    ways = dict.fromkeys(_way(setting, command) for setting in settings)
    return _told(flag, settings, their, f": pass {' and '.join(ways)}")


def markdown_names() -> str:
    """The table of names, as the documentation shows it."""
    lines = ["| their name | of | `align` | what differs |", "|---|---|---|---|"]
    for their in TABLE:
        cells = (
            ", ".join(f"`{name}`" for name in their.names),
            ", ".join(their.tools),
            " and ".join(f"`{setting}`{_flag(setting)}" for setting in their.settings),
            their.note,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


@cache
def _by_name() -> dict[str, TheirName]:
    return {name: their for their in TABLE for name in their.names}


def _found(name: str) -> tuple[TheirName | None, tuple[str, ...]]:
    """The line of a name, and the settings meant; a setting of ours has no line."""
    section, _, last = name.rpartition(".")
    if their := _by_name().get(name) or _by_name().get(last):
        return their, their.settings
    if section and section not in _sections():
        return None, ()
    ours = [setting for setting in declared() if setting.rpartition(".")[2] == last]
    return None, tuple(ours) if len(ours) == 1 else ()


def _sections() -> set[str]:
    return {setting.partition(".")[0] for setting in declared()}


def _is_option(key: str) -> bool:
    """Whether methods are asked for an option of this name; which of them has it, they say."""
    their = _by_name().get(key)
    return not their or f"method.{key}" in their.settings


def _told(name: str, settings: Sequence[str], their: TheirName | None, way: str = "") -> str:
    note = f" {their.note}" if their and their.note else ""
    if settings:
        return f"{name} is {' and '.join(settings)} here{way}.{note}"
    return f"{name} has no setting here.{note}" if their else ""


def _flag(setting: str) -> str:
    flag = facts_of(setting).flag
    return f" (`{flag}`)" if flag else ""


def _way(setting: str, command: str) -> str:
    """How a person gives a setting, to this command if it takes it, else to one that does."""
    on = facts_of(setting).on
    this = [one for one in COMMANDS if one == command]
    likely = (*this, *on) if command in on else (*on, *this, *facts_of(setting).read_by)
    taker = next(one for one in likely if reads(one, setting))
    word = flag_of(setting, taker) or f"--set {setting}=VALUE"
    return word if taker == command else f"{word} to `align {taker}`"
