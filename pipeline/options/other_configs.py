"""The options in the config files of HALOs and NeMo-Aligner, and what they are here.

Those that share a name with a flag of another trainer stand with the flags.
"""

from __future__ import annotations

from .other_flags import HALOS, NEMO, named

_MEGATRON = "Of Megatron's kernels and collectives; DeepSpeed has its own, in train.deepspeed."
_LIGHTNING = "Of its own launcher and loop; torchrun, deepspeed or Slurm starts the ranks."
_DATA_FILES = "Of memory-mapped data; a cache's shards are its own."
_PART = (
    "A number of batches, not a share of them. train.eval_fraction or train.eval_cache says which "
    "rows are held out."
)
_EXAMPLES = "In optimizer steps, where HALOs counts examples."
_EPOCHS = (
    "A pass over the rows changes nothing that the ratio divides by: the reference's log-probs are "
    "stored. HALOs repeats each batch before it reads the next one."
)

OF_CONFIGS = (
    # HALOs: config.yaml.
    named("loss trainer loss.trainer loss.dataloader", HALOS, "train.method",
        "kto, dpo, cdpo, ipo, simpo, slic, grpo, ppo, sft and csft are called the same; "
        "bradley-terry is reward. A method brings its own rows."),
    named("name_or_path load_from", HALOS, "model.path",
        "The reference, of `align precompute-ref`; the policy begins as it, or is train.model."),
    named("debug", HALOS, "train.max_steps", "A few steps, with --no-mlflow."),
    named("cache_dir", HALOS, "", "Model and data are given as folders and files."),
    named("do_first_eval", HALOS, "", "Held-out rows are always measured before the first step."),
    named("minimum_log_interval_secs", HALOS, "train.log_every", "In optimizer steps."),
    named("eval_every", HALOS, "train.eval_every", _EXAMPLES),
    named("save_every", HALOS, "train.save_every", _EXAMPLES),
    named("intermediate_checkpoints", HALOS, "train.save_every", "In optimizer steps."),
    named("template_tokens", HALOS, "", "Add them to the tokenizer's folder first."),
    named("frac_unique_desirable", HALOS, "train.desirable_share"),
    named("frac_unique_undesirable", HALOS, "train.undesirable_share"),
    named("n_examples", HALOS, "train.max_steps", "In optimizer steps of train.batch_size rows."),
    named("n_eval_examples", HALOS, "train.limit_eval_batches",
        "In batches of train.batch_size rows; all held-out rows unless set."),
    named("step_scheduler_with_optimizer", HALOS, "",
        "The learning rate follows from the optimizer step, on any number of ranks."),
    named("optimizer", HALOS, "train.optimizer", "AdamW is adamw; RMSprop and SGD are not there."),
    named("cache_reference_logprobs", HALOS, "", "Nothing needs to be set: it is always so."),
    named("load_reference_logprobs", HALOS, "train.cache", "Shards of Parquet, and no pickle."),
    named("humanline", HALOS, "method.humanline",
        "It needs a cache made with --token-logps, but for simpo and slic. The reference does not "
        "move in a training: with humanline HALOs syncs it as well."),
    named("log_epsilon_P", HALOS, "method.log_eps_p"),
    named("log_epsilon_R", HALOS, "method.log_eps_r"),
    named("online", HALOS, "", "`align rounds` samples, judges and trains in turns."),
    named("sync_reference", HALOS, "rounds.reference",
        "A cache's reference cannot move within a training. Go round by round: train, make a cache "
        "with the trained model, train again on it; `align rounds` does so with previous."),
    # HALOs: loss/*.yaml.
    named("loss.beta", HALOS, "method.beta", "Of slic method.delta."),
    named("loss.tau", HALOS, "method.beta", "Of ipo."),
    named("loss.epsilon", HALOS, "method.label_smoothing method.epsilon",
        "Of cdpo the former; of grpo the latter, 0.2 unless set, where HALOs has 0.01."),
    named("loss.gamma", HALOS, "method.gamma", "Of ppo."),
    named("ppo_epochs", HALOS, "train.epochs", _EPOCHS),
    named("gamma_beta_ratio", HALOS, "method.gamma_ratio", "Of simpo."),
    named("lambda_coef", HALOS, "method.lam", "Of slic."),
    named("control_tokens.chosen", HALOS, "method.good_token", "Of csft."),
    named("control_tokens.rejected", HALOS, "method.bad_token", "Of csft."),
    named("sequence_level", HALOS, "", "HALOs reads it nowhere. method.normalize of grpo says what "
        "counts the same, a token or a candidate."),
    # HALOs: model/*.yaml.
    named("block_name", HALOS, "", "DeepSpeed wraps no blocks: zero3 spreads every weight."),
    named("reference_dtype", HALOS, "model.dtype"),
    named("microbatch_size", HALOS, "train.tokens_per_batch",
        "In tokens; changes only memory and speed."),
    named("v_head_max_grad_norm", HALOS, "train.max_grad_norm",
        "One norm for the policy and its value head, as DeepSpeed takes it; method.vf weighs the "
        "head's share, and method.value_clip bounds what it learns from."),
    named("load_lora_from", HALOS, "model.adapter",
        "It is read with the reference; a training always begins a new adapter."),
    named("model.reward_model.path", HALOS, "rewards.model",
        "`align score` writes the scores into the data, and `align judge --by reward` samples'."),
    named("model.reward_model.model_class", HALOS, "", "A reward model's own config says it."),
    named("model.reward_model.dtype", HALOS, "model.dtype", "Of `align score`."),
    named("model.reward_model.attn_implementation", HALOS, "model.attention", "Of `align score`."),
    # NeMo-Aligner: trainer and exp_manager.
    named("num_nodes devices accelerator use_distributed_sampler enable_checkpointing logger", NEMO,
        "", _LIGHTNING),
    named("trainer.max_steps trainer.dpo.max_steps trainer.kto.max_steps", NEMO,
        "train.max_steps", "0 is no limit, as -1 is there."),
    named("limit_train_batches", NEMO, "train.limit_train_batches", "A number of steps per epoch."),
    named("limit_val_batches", NEMO, "train.limit_eval_batches", _PART),
    named("trainer.max_time max_time_per_run", NEMO, "train.max_time"),
    named("exp_dir exp_manager.name", NEMO, "train.output", "The whole folder of the run."),
    named("exp_manager.resume_from_checkpoint resume_ignore_no_checkpoint", NEMO, "train.resume",
        "auto continues from the newest checkpoint of the folder, and begins where there is none."),
    named("create_checkpoint_callback", NEMO, "train.save_minutes",
        "One is always saved at the end, and by time."),
    named("checkpoint_callback_params.mode", NEMO, "train.best",
        "The name says it; -NAME takes the lowest, +NAME the highest."),
    named("always_save_nemo save_nemo_on_train_end", NEMO, "",
        "A folder that transformers loads is written at the end."),
    named("filename model_parallel_size", NEMO, "", "Checkpoints are called by their step."),
    named("restore_from_path", NEMO, "model.path",
        "A Hugging Face folder: convert a .nemo file first."),
    # NeMo-Aligner: model.
    named("global_batch_size", NEMO, "train.batch_size"),
    named("mcore_gpt megatron_amp_O2", NEMO, "", _MEGATRON),
    named("ref_policy_kl_penalty", NEMO, "method.beta"),
    named("preference_average_log_probs", NEMO, "train.method method.mean_ratios",
        "dpo with it is dpo_norm; ipo has method.normalize, mean unless set; kto and the rpo ones "
        "take method.mean_ratios."),
    named("sft_average_log_probs", NEMO, "method.sft_normalize",
        "A mean unless set, where NeMo-Aligner takes a sum. Its kto reads it nowhere."),
    named("preference_loss", NEMO, "train.method", "dpo, ipo, rpo_sq, rpo_bwd_kl or rpo_fwd_kl."),
    named("preference_loss_weight", NEMO, "",
        "method.sft_weight is sft_loss_weight divided by it; a mixture has weights of its own."),
    named("sft_loss_weight", NEMO, "method.sft_weight",
        "Of kto, where NeMo-Aligner reads it nowhere, a mixture: kto:1+sft:0.1."),
    named("gt_reward_scale", NEMO, "method.eta"),
    named("default_chosen_reward default_rejected_reward", NEMO, "",
        "The rpo methods ask for two scores in every row."),
    named("log_prob_forward_micro_batch_size", NEMO, "scoring.tokens_per_batch",
        "Of `align precompute-ref`, in tokens."),
    named("peft.restore_from_path peft.restore_from_ckpt.checkpoint_dir "
        "peft.restore_from_ckpt.checkpoint_name", NEMO, "model.adapter",
        "It is read with the reference; a training always begins a new adapter."),
    named("column_init_method row_init_method", NEMO, "", "As peft begins an adapter: B is 0."),
    named("layer_selection", NEMO, "lora.targets", "Names of layers, with their number in it."),
    named("weight_tying position_embedding_strategy", NEMO, "", "No layers share an adapter."),
    named("optim.name", NEMO, "train.optimizer",
        "distributed_fused_adam is adamw; from zero1 on its states are spread."),
    named("bucket_cap_mb overlap_grad_sync contiguous_grad_buffer", NEMO, "train.deepspeed",
        "In a DeepSpeed JSON file, as buckets of zero_optimization."),
    named("optim.lr", NEMO, "train.lr", "1e-6 unless set; NeMo-Aligner's is 9e-6."),
    named("optim.weight_decay", NEMO, "train.weight_decay", "0 unless set; NeMo-Aligner's is 0.1."),
    named("optim.betas", NEMO, "train.beta1 train.beta2",
        "0.9 and 0.999 unless set; NeMo-Aligner's are 0.9 and 0.98."),
    named("sched.name", NEMO, "train.schedule", "CosineAnnealing is cosine."),
    named("sched.constant_steps", NEMO, "", "The schedule falls from the end of its warmup on."),
    named("sched.min_lr", NEMO, "train.min_lr", "A share of train.lr."),
    named("data_prefix model.data.data_prefix", NEMO, "data.files",
        "They are the arguments of `align precompute-ref`."),
    named("data_impl index_mapping_dir skip_warmup dataloader_type "
        "overwrite_base_config.data.data_prefix", NEMO, "", _DATA_FILES),
    named("splits_string", NEMO, "train.eval_fraction", "Or another cache, train.eval_cache."),
    named("seq_length", NEMO, "tokens.max_length", "When the cache is made."),
    named("pad_length_to_multiple_of", NEMO, "", "The layout of a batch decides it."),
    named("num_workers", NEMO, "data.workers", "A training reads ahead on its own."),
    named("reset_position_ids reset_attention_mask eod_mask_loss", NEMO, "",
        "Rows never see each other; what ends a completion is learned, once."),
)  # fmt: skip
