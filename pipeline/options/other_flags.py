"""The flags of TRL, axolotl, LLaMA-Factory, OpenRLHF and ColossalAI, and what they are here."""

from __future__ import annotations

from dataclasses import dataclass

TRL, AXOLOTL, FACTORY = "TRL", "axolotl", "LLaMA-Factory"
OPENRLHF, HALOS, NEMO, COLOSSAL = "OpenRLHF", "HALOs", "NeMo-Aligner", "ColossalAI"
HF = (TRL, AXOLOTL, FACTORY)  # all three take the names of transformers' TrainingArguments
EVERY = (TRL, AXOLOTL, OPENRLHF, FACTORY)
FLAGS = (*EVERY, COLOSSAL)
ALL = (*FLAGS, HALOS)


@dataclass(frozen=True)
class TheirName:
    """One option under all of its names, and what it is here."""

    names: tuple[str, ...]
    tools: tuple[str, ...]
    settings: tuple[str, ...]  # empty: nothing is to be set
    note: str  # where the meaning differs, in sentences


def named(names: str, tools: tuple[str, ...] | str, settings: str, note: str = "") -> TheirName:
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
_TRACKERS = (
    "Names with commas between; without it runs are recorded in MLflow. "
    "Those of wandb are offline: wandb sync uploads them."
)
_LIKE_NO_OTHER = "A share of the prompts is held out, chosen by their hash; 0 holds out none."

OF_FLAGS = (
    # The model and the data.
    named("model_name_or_path base_model pretrain model.model_name_or_path", FLAGS, "model.path",
        _REFERENCE + " Another policy is train.model."),
    named("ref_model ref_pretrain ref.model_name_or_path", EVERY, "model.path",
        _REFERENCE + " Where the policy is another model, that one is train.model, with "
        "train.other_reference=true."),
    named("adapter_name_or_path lora_model_dir", (AXOLOTL, FACTORY), "model.adapter",
        "It is read with the reference; a training always begins a new adapter."),
    named("ref_offload ref.offload", OPENRLHF, "", "A training holds no reference model."),
    named("torch_dtype", TRL, "model.dtype", "Of the reference; the policy's is train.dtype."),
    named("trust_remote_code", HF, "", "No code of a model folder is ever run."),
    named("attn_implementation flash_attn use_flash_attn", ALL, "model.attention",
        "auto takes FlexAttention on a GPU where it is true to the model."),
    named("dataset dataset_name datasets data.dataset train_datasets", ALL, "data.files",
        "They are the arguments of `align precompute-ref`: files or folders on this machine."),
    named("dataset_probs prompt_data_probs interleave_probs data.dataset_probs",
        (OPENRLHF, FACTORY), "train.file_weights",
        "Not the probability of a file, but how often an epoch draws each of its rows."),
    named("eval_dataset test_datasets eval.dataset", ALL, "train.eval_cache",
        "Another cache, made of these files; train.eval_fraction holds out a part instead."),
    named("val_set_size val_size", (AXOLOTL, FACTORY), "train.eval_fraction", _LIKE_NO_OTHER),
    named("prompt_key input_key output_key chosen_key rejected_key label_key data.prompt_key "
        "data.chosen_key data.rejected_key", OPENRLHF, "data.map",
        "Such as --map prompt=YOURS, chosen, rejected, completion or label."),
    named("apply_chat_template data.apply_chat_template", OPENRLHF, "data.wrap",
        "Conversations are templated always; plain text where data.wrap is chat."),
    named("dataset_split", OPENRLHF, "data.split"),
    named("eval_split", OPENRLHF, "data.split", "Of the command that makes the second cache."),
    named("disable_loss_mask", COLOSSAL, "",
        "Both sides of a row share one pass over its prompt, and only completions reach the output "
        "head: prompts are never learned. tokens.learn chooses among a completion's messages."),
    named("tokenizer_dir tokenizer_name_or_path disable_fast_tokenizer model_type",
        (OPENRLHF, HALOS, COLOSSAL), "",
        "The model's folder has the tokenizer (tokenizer.json) and says what the model is."),
    named("input_template data.input_template", OPENRLHF, "",
        "Write the template into the prompts, or let the tokenizer's chat template do it."),
    named("chat_template chat_template_jinja data.tokenizer_chat_template template",
        (AXOLOTL, OPENRLHF, FACTORY), "tokens.chat_template",
        "A Jinja file in place of the tokenizer's own template."),
    named("dataset_num_proc preprocessing_num_workers dataset_processes", HF, "data.workers"),
    named("max_length max_len sequence_len cutoff_len data.max_len", ALL, "tokens.max_length",
        _AT_ONCE + " 2,048 unless set; TRL's default is 1,024."),
    named("max_prompt_length max_prompt_len", (TRL, AXOLOTL, HALOS), "tokens.max_prompt_length",
        _AT_ONCE),
    named("truncation_mode", TRL, "tokens.prompt_side",
        "keep_end is left, the default: prompts lose their start, completions their end."),
    # The method.
    named("loss_type pref_loss rl stage", HF, "train.method", _LOSSES),
    named("loss_weights", TRL, "train.method", _LOSSES),
    named("ipo model.ipo_enable", OPENRLHF, "train.method",
        "With method.normalize=sum: OpenRLHF compares sums, the default here means."),
    named("beta pref_beta rl_beta model.beta", FLAGS, "method.beta",
        "Of ORPO it is method.lam (orpo_alpha in axolotl)."),
    named("orpo_alpha lam", (AXOLOTL, HALOS, COLOSSAL), "method.lam",
        "Of orpo; HALOs' lam is ppo's, which is called the same here."),
    named("auto_weight", COLOSSAL, "method.desirable_weight method.undesirable_weight",
        "Both auto."),
    named("disable_reference_model", COLOSSAL, "", "A method without a reference reads none."),
    named("label_smoothing dpo_label_smoothing model.label_smoothing", EVERY,
        "method.label_smoothing"),
    named("desirable_weight kto_desirable_weight kto_chosen_weight desirable_loss_weight",
        (*ALL, NEMO), "method.desirable_weight", "auto makes both labels as heavy."),
    named("undesirable_weight kto_undesirable_weight kto_rejected_weight undesirable_loss_weight",
        (*ALL, NEMO), "method.undesirable_weight", "auto makes both labels as heavy."),
    named("rpo_alpha pref_ftx nll_loss_coef model.nll_loss_coef", EVERY, "method.sft_weight"),
    named("cpo_alpha", (TRL, AXOLOTL), "method.alpha", "Of cpo."),
    named("simpo_gamma", HF, "method.gamma_ratio", "It is gamma divided by beta."),
    named("f_divergence_type", TRL, "method.f_divergence",
        "reverse_kl, forward_kl, js or alpha."),
    named("f_alpha_divergence_coef", TRL, "method.f_alpha"),
    named("use_weighting dpo_use_weighting", (TRL, AXOLOTL), "method.wpo"),
    named("ld_alpha", (TRL, FACTORY), "method.ld_alpha",
        "It needs a cache made with --token-logps."),
    named("discopop_tau", TRL, "method.tau"),
    named("kl_coef init_kl_coef KL_coef", (TRL, OPENRLHF, HALOS), "method.kl",
        "Of ppo; of grpo the distance from the reference weighs method.beta."),
    named("cliprange eps_clip", (TRL, OPENRLHF, HALOS), "method.epsilon", "Of ppo and grpo."),
    named("cliprange_value", TRL, "method.value_clip", "Of ppo; 0 is none."),
    named("vf_coef critic_coef", (TRL, HALOS), "method.vf", "Of ppo."),
    named("precompute_ref_log_probs", TRL, "", _ALWAYS),
    named("precompute_ref_batch_size", TRL, "scoring.tokens_per_batch", "In tokens, not rows."),
    named("sync_ref_model", TRL, "",
        "The reference of a cache does not move; `align rounds` takes the last round's policy."),
    # Batches and the length of a training.
    named("per_device_train_batch_size", HF, "train.batch_size", _BATCH),
    named("train_batch_size train.batch_size batch_size", (AXOLOTL, OPENRLHF, HALOS, COLOSSAL),
        "train.batch_size", _MEAN + " ColossalAI's batch_size is the micro-batch of one rank."),
    named("micro_batch_size micro_train_batch_size train.micro_batch_size",
        (AXOLOTL, OPENRLHF, NEMO), "train.tokens_per_batch", _MICRO),
    named("gradient_accumulation_steps accumulation_steps", (*HF, HALOS, COLOSSAL),
        "train.batch_size",
        _NO_STEPS),
    named("per_device_eval_batch_size eval_batch_size eval_microbatch_size", (*HF, HALOS),
        "train.tokens_per_batch",
        "Evaluations take the micro-batch of the training."),
    named("num_train_epochs num_epochs max_epochs train.max_epochs n_epochs", (*ALL, NEMO),
        "train.epochs", _EPOCHS),
    named("max_samples", (OPENRLHF, FACTORY), "train.max_steps",
        "A number of optimizer steps; for fewer rows, give `align precompute-ref` a smaller file."),
    named("seed", (*EVERY, HALOS, NEMO), "train.seed",
        "cache.seed orders the rows and draws KTO's partners."),
    # The optimizer.
    named("learning_rate adam.lr", EVERY, "train.lr"),
    named("lr_scheduler_type lr_scheduler", EVERY, "train.schedule",
        "constant, linear or cosine; where it ends is train.min_lr."),
    named("warmup_ratio warmup_steps lr_warmup_ratio", (*FLAGS, NEMO), "train.warmup", _WARMUP),
    named("min_lr_ratio cosine_min_lr_ratio", (AXOLOTL, OPENRLHF), "train.min_lr",
        "A share of train.lr."),
    named("optim", (TRL, FACTORY), "train.optimizer",
        "adamw_torch is adamw, adamw_8bit adamw8bit; a DeepSpeed JSON file may name another."),
    named("l2 adam.weight_decay", OPENRLHF, "train.weight_decay"),
    named("adam_beta1", HF, "train.beta1"),
    named("adam_beta2", HF, "train.beta2"),
    named("adam_betas adam.betas", OPENRLHF, "train.beta1 train.beta2",
        "0.9 and 0.999 unless set; OpenRLHF's are 0.9 and 0.95."),
    named("adam_epsilon adam.eps eps", (*EVERY, HALOS), "train.epsilon"),
    named("max_norm grad_clip gradient_clip_val", (OPENRLHF, NEMO, COLOSSAL),
        "train.max_grad_norm"),
    named("disable_dropout", TRL, "train.dropout", "The other way round: off unless it is true."),
    named("router_aux_loss_coef aux_loss_coef output_router_logits", (TRL, OPENRLHF),
        "train.router_loss", "It is taken over the whole step."),
    # Memory, precision and many GPUs.
    named("bf16 fp16 bfloat16 float16 pure_bf16 ds.param_dtype param_dtype policy_dtype precision "
        "mixed_precision", (*ALL, NEMO), "train.dtype",
        "bfloat16 or float16; what accumulates is float32."),
    named("grad_accum_dtype ds.grad_accum_dtype", OPENRLHF, "", "Gradients accumulate in float32."),
    named("zero_stage ds.zero_stage", (OPENRLHF, COLOSSAL), "train.deepspeed",
        "zero0 to zero3, or a DeepSpeed JSON file."),
    named("adam_offload ds.adam_offload zero_cpu_offload", (OPENRLHF, COLOSSAL), "train.deepspeed",
        "zero2-offload or zero3-offload."),
    named("fsdp fsdp_config", HF, "train.deepspeed", "zero3 spreads the policy as FSDP does."),
    named("packing sample_packing padding_free packing_samples neat_packing ds.packing_samples",
        EVERY, "", "Nothing needs to be set: the completions of a prompt share a sequence, and "
        "rows of like length a batch."),
    named("group_by_length train_sampling_strategy", HF, "",
        "Rows are shuffled, those of like length share a micro-batch, and KTO's partners do not "
        "depend on the order."),
    named("gradient_checkpointing grad_checkpoint activation_checkpointing", ALL,
        "train.gradient_checkpointing",
        "auto recomputes where activations do not fit (train.memory); TRL always does."),
    named("ring_attn_size ds.ring_attn_size sequence_parallel_degree sp "
        "enable_sequence_parallelism", (AXOLOTL, OPENRLHF, COLOSSAL), "",
        "No ranks share a sequence. For long rows set train.gradient_checkpointing and "
        "train.checkpoint_offload."),
    named("tensor_parallel_size ds.tensor_parallel_size", OPENRLHF, "model.device_map",
        "Of the reference, while its cache is made; --deepspeed zero3 spreads the policy."),
    named("plugin", COLOSSAL, "train.deepspeed",
        "zero2 is zero2; zero2_cpu is zero2-offload, gemini zero3 or zero3-offload; 3d is zero3."),
    named("tp", COLOSSAL, "model.device_map",
        "Of the reference, while its cache is made; --deepspeed zero3 spreads the policy."),
    named("pp", COLOSSAL, "", "--deepspeed zero3 spreads the policy."),
    named("sp_mode", COLOSSAL, "", "No ranks share a sequence."),
    named("zpg overlap_comm", OPENRLHF, "train.deepspeed",
        "In a DeepSpeed JSON file: zero_optimization.zero_hpz_partition_size and .overlap_comm."),
    named("local_rank", OPENRLHF, "", "The launcher says it in the environment."),
    named("use_liger_kernel", OPENRLHF, "",
        "The fused output head needs no logits, with no switch."),
    named("deepcompile", OPENRLHF, "model.compile",
        "true or false: the decoder layers, by torch.compile; not under ZeRO-3."),
    named("gradient_checkpointing_use_reentrant", OPENRLHF, "", "Never re-entrant."),
    named("full_determinism", OPENRLHF, "",
        "train.seed decides all draws; which kernels a GPU takes is left to torch."),
    # Adapters.
    named("use_peft finetuning_type peft_config lora_config peft_scheme",
        (TRL, FACTORY, HALOS, NEMO, COLOSSAL), "lora.enabled",
        "lora.rank, lora.alpha and lora.targets say how; DoRA and the like are not there."),
    named("lora_r lora_rank ds.lora.rank adapter_dim", (*EVERY, HALOS, NEMO), "lora.rank",
        "With --lora, which turns the adapter on."),
    named("lora_alpha ds.lora.alpha", (*EVERY, HALOS), "lora.alpha"),
    named("lora_dropout ds.lora.dropout adapter_dropout", (*EVERY, HALOS, NEMO), "lora.dropout",
        "It needs train.dropout=true as well."),
    named("lora_target_modules lora_target target_modules ds.lora.target_modules "
        "lora_target_linear", (*EVERY, HALOS, NEMO), "lora.targets", "Empty is all linear layers."),
    named("load_in_4bit quantization_bit ds.load_in_4bit", EVERY, "lora.quantize", "nf4."),
    named("merge_lora", AXOLOTL, "lora.merge"),
    # Evaluations, checkpoints and records.
    named("eval_steps eval_strategy evals_per_epoch eval.steps val_check_interval",
        (*EVERY, NEMO), "train.eval_every",
        "In optimizer steps; rows are held out by train.eval_fraction or train.eval_cache."),
    named("save_steps save_strategy saves_per_epoch ckpt.save_steps save_interval",
        (*FLAGS, NEMO), "train.save_every",
        "In optimizer steps; one is saved by time as well (train.save_minutes)."),
    named("save_total_limit max_ckpt_num ckpt.max_num", EVERY, "train.keep_last",
        "Of the best ones train.keep_best is kept besides."),
    named("metric_for_best_model greater_is_better monitor", (*HF, NEMO), "train.best",
        "The name of a metric, such as eval/loss; -NAME where the lowest is the best, +NAME the "
        "highest."),
    named("load_best_model_at_end", HF, "train.write_best", "By the metric of train.best."),
    named("early_stopping_patience early_stopping_steps", HF, "train.patience",
        "In evaluations, by the metric of train.best. The model is that of the last step, unless "
        "train.write_best is true."),
    named("early_stopping_threshold", HF, "train.min_delta"),
    named("save_top_k", NEMO, "train.keep_best", "By the metric of train.best."),
    named("resume_from_checkpoint auto_resume_from_checkpoints load_checkpoint ckpt.load_enable "
        "checkpoint_path from_checkpoint resume_if_exists", (*ALL, NEMO), "train.resume",
        "auto continues from the newest checkpoint."),
    named("output_dir save_path ckpt_path ckpt.output_dir save_dir local_run_dir explicit_log_dir",
        (*ALL, NEMO), "train.output",
        "The folder of the run; the model is in its folder model. A cache has cache.output."),
    named("use_ds_universal_ckpt", OPENRLHF, "",
        "Every checkpoint resumes on any number of ranks and under any ZeRO stage."),
    named("save_hf_ckpt disable_ds_ckpt", OPENRLHF, "",
        "The model is written once, when the training ends; checkpoints are to resume from."),
    named("max_ckpt_mem", OPENRLHF, "train.keep_last", "A number of checkpoints, not their size."),
    named("config_file", COLOSSAL, "", "A run keeps its settings in its folder, always."),
    named("overwrite_output_dir", FACTORY, "",
        "A finished run is never written over: name another."),
    named("logging_steps", EVERY, "train.log_every"),
    named("report_to use_wandb use_mlflow use_tensorboard log_dir wandb.enabled "
        "create_wandb_logger",
        (*ALL, NEMO), "tracking.trackers",
        _TRACKERS),
    named("wandb_org wandb_group wandb.entity", (OPENRLHF, HALOS), "",
        "tracking.trackers says where a run is recorded; accounts and groups have no setting."),
    named("use_ms", OPENRLHF, "", "Models and data are folders and files."),
    named("mlflow_tracking_uri", AXOLOTL, "tracking.uri"),
    named("mlflow_experiment_name wandb_project wandb.project wandb_logger_kwargs.project",
        (*EVERY, HALOS, NEMO), "tracking.experiment"),
    named("run_name mlflow_run_name wandb_run_name exp_name wandb_logger_kwargs.name",
        (*EVERY, HALOS, NEMO), "tracking.run_name"),
)  # fmt: skip
