"""Every option that five trainers document, and the page that says what each of them is in align.

The names are read from the files named here, at the commit named here.
`PYTHONPATH=tests:PARENT python tests/support/seed_options.py`, PARENT being the folder above this
checkout, writes the tables of docs/options-of-other-trainers.md anew.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from align.pipeline.options.other_names import answer_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "options-of-other-trainers.md"


@dataclass(frozen=True)
class Trainer:
    """One trainer: its name in the table of other names, and its options as it writes them."""

    name: str
    heading: str
    source: str  # project, commit and files
    options: tuple[str, ...]


COLOSSAL_SHARED = """
    plugin grad_clip weight_decay warmup_steps tp pp sp disable_loss_mask
    enable_sequence_parallelism zero_stage zero_cpu_offload sp_mode pretrain tokenizer_dir dataset
    eval_dataset checkpoint_path config_file save_dir max_length max_epochs batch_size
    mixed_precision lora_config save_interval lr accumulation_steps log_dir use_wandb
    grad_checkpoint use_flash_attn
"""
NEMO_SHARED = """
    trainer.num_nodes trainer.devices trainer.accelerator trainer.precision
    trainer.{}.max_epochs trainer.{}.max_steps trainer.{}.val_check_interval
    trainer.{}.save_interval trainer.{}.limit_train_batches trainer.{}.limit_val_batches
    trainer.{}.gradient_clip_val trainer.logger trainer.enable_checkpointing
    trainer.use_distributed_sampler trainer.max_time trainer.max_epochs trainer.max_steps
    exp_manager.explicit_log_dir exp_manager.exp_dir exp_manager.name exp_manager.max_time_per_run
    exp_manager.create_wandb_logger exp_manager.wandb_logger_kwargs.project
    exp_manager.wandb_logger_kwargs.name exp_manager.resume_from_checkpoint
    exp_manager.resume_if_exists exp_manager.resume_ignore_no_checkpoint
    exp_manager.create_checkpoint_callback exp_manager.checkpoint_callback_params.monitor
    exp_manager.checkpoint_callback_params.mode
    exp_manager.checkpoint_callback_params.save_top_k
    exp_manager.checkpoint_callback_params.always_save_nemo
    exp_manager.checkpoint_callback_params.save_nemo_on_train_end
    exp_manager.checkpoint_callback_params.filename
    exp_manager.checkpoint_callback_params.model_parallel_size
    pretrained_checkpoint.restore_from_path model.mcore_gpt model.micro_batch_size
    model.global_batch_size model.megatron_amp_O2 model.{}.log_prob_forward_micro_batch_size
    model.{}.ref_policy_kl_penalty model.{}.preference_average_log_probs
    model.{}.sft_average_log_probs model.{}.preference_loss_weight model.{}.sft_loss_weight
    model.seed model.peft.peft_scheme model.peft.restore_from_path
    model.peft.restore_from_ckpt.checkpoint_dir model.peft.restore_from_ckpt.checkpoint_name
    model.peft.lora_tuning.target_modules model.peft.lora_tuning.adapter_dim
    model.peft.lora_tuning.adapter_dropout model.peft.lora_tuning.column_init_method
    model.peft.lora_tuning.row_init_method model.peft.lora_tuning.layer_selection
    model.peft.lora_tuning.weight_tying model.peft.lora_tuning.position_embedding_strategy
    model.optim.name model.optim.bucket_cap_mb model.optim.overlap_grad_sync
    model.optim.contiguous_grad_buffer model.optim.lr model.optim.weight_decay model.optim.betas
    model.optim.sched.name model.optim.sched.warmup_steps model.optim.sched.constant_steps
    model.optim.sched.min_lr model.data.data_impl model.data.splits_string model.data.seq_length
    model.data.skip_warmup model.data.num_workers model.data.reset_position_ids
    model.data.reset_attention_mask model.data.eod_mask_loss model.data.index_mapping_dir
    model.data.data_prefix model.overwrite_base_config.data.data_prefix precision
"""
NEMO_DPO = """
    model.dpo.gt_reward_scale model.dpo.preference_loss model.data.pad_length_to_multiple_of
    model.data.default_chosen_reward model.data.default_rejected_reward
"""
NEMO_KTO = """
    model.kto.desirable_loss_weight model.kto.undesirable_loss_weight model.data.dataloader_type
"""
OPENRLHF_KTO = """
    save_path save_steps save_hf_ckpt disable_ds_ckpt logging_steps eval_steps ckpt_path
    max_ckpt_num max_ckpt_mem load_checkpoint use_ds_universal_ckpt max_norm micro_train_batch_size
    train_batch_size gradient_checkpointing deepcompile seed full_determinism
    disable_fast_tokenizer local_rank zero_stage param_dtype ref_offload zpg adam_offload
    attn_implementation use_liger_kernel grad_accum_dtype overlap_comm
    gradient_checkpointing_use_reentrant load_in_4bit lora_rank lora_alpha target_modules
    lora_dropout max_epochs beta pretrain learning_rate lr_warmup_ratio lr_scheduler l2
    aux_loss_coef adam_betas desirable_loss_weight undesirable_loss_weight dataset dataset_split
    dataset_probs eval_dataset eval_split max_samples input_key output_key label_key input_template
    apply_chat_template max_len use_wandb wandb_org wandb_group wandb_project wandb_run_name
    use_tensorboard use_ms
"""
HALOS_CONFIG = """
    seed exp_name train_datasets test_datasets debug wandb.enabled wandb.entity wandb.project
    cache_dir local_run_dir do_first_eval minimum_log_interval_secs intermediate_checkpoints loss
    trainer template_tokens lr n_epochs n_examples
    frac_unique_desirable frac_unique_undesirable n_eval_examples eval_every save_every
    step_scheduler_with_optimizer optimizer weight_decay beta1 beta2 eps warmup
    cache_reference_logprobs load_reference_logprobs humanline log_epsilon_P log_epsilon_R online
    loss.trainer loss.dataloader loss.sync_reference loss.beta loss.epsilon
    loss.control_tokens.chosen loss.control_tokens.rejected loss.sequence_level loss.tau
    loss.desirable_weight loss.undesirable_weight loss.ppo_epochs loss.cliprange loss.lam
    loss.gamma loss.critic_coef loss.KL_coef loss.gamma_beta_ratio loss.lambda_coef
    model.name_or_path model.tokenizer_name_or_path model.load_from model.from_checkpoint
    model.block_name model.policy_dtype model.reference_dtype model.max_grad_norm
    model.v_head_max_grad_norm model.max_length model.max_prompt_length
    model.activation_checkpointing model.batch_size model.microbatch_size
    model.gradient_accumulation_steps model.eval_batch_size model.eval_microbatch_size
    model.attn_implementation model.use_peft model.load_lora_from model.peft.lora_r
    model.peft.lora_alpha model.peft.lora_dropout model.peft.target_modules
    model.reward_model.path model.reward_model.model_class model.reward_model.dtype
    model.reward_model.attn_implementation
"""


def _listed(*names, of=""):
    return tuple(" ".join(names).replace("{}", of).split())


_COATI = "hpcaitech/ColossalAI 4f9953b, applications/ColossalChat/examples/training_scripts/"
_NEMO = "NVIDIA/NeMo-Aligner af2b3bd, examples/nlp/gpt/conf/"
TRAINERS = (
    Trainer(
        "ColossalAI",
        "ColossalAI: KTO",
        f"{_COATI}train_kto.py",
        _listed(COLOSSAL_SHARED, "beta desirable_weight undesirable_weight auto_weight"),
    ),
    Trainer(
        "ColossalAI",
        "ColossalAI: ORPO",
        f"{_COATI}train_orpo.py",
        _listed(COLOSSAL_SHARED, "lam model_type disable_reference_model"),
    ),
    Trainer(
        "OpenRLHF",
        "OpenRLHF: KTO",
        "OpenRLHF/OpenRLHF 0489850, openrlhf/cli/train_kto.py",
        _listed(OPENRLHF_KTO),
    ),
    Trainer(
        "NeMo-Aligner",
        "NeMo-Aligner: DPO",
        f"{_NEMO}gpt_dpo.yaml",
        _listed(NEMO_SHARED, NEMO_DPO, of="dpo"),
    ),
    Trainer(
        "NeMo-Aligner",
        "NeMo-Aligner: KTO",
        f"{_NEMO}gpt_kto.yaml",
        _listed(NEMO_SHARED, NEMO_KTO, of="kto"),
    ),
    Trainer(
        "HALOs",
        "HALOs",
        "ContextualAI/HALOs 4831988, config/config.yaml, config/loss/*.yaml, "
        "config/model/base_model.yaml",
        _listed(HALOS_CONFIG),
    ),
)


def section_of(trainer):
    """The part of the page that is about one trainer: a line for each option."""
    lines = ["| option | `align` | what differs, or why it is not there |", "|---|---|---|"]
    for option in trainer.options:
        ours, note = answer_of(option)
        lines.append(f"| `{option}` | {ours} | {note} |")
    table = "\n".join(lines)
    return f"## {trainer.heading}\n\nAs of {trainer.source}.\n\n{table}\n"


def main():
    """Writes the tables into the page."""
    head = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), maxsplit=1, flags=re.MULTILINE)[0]
    page = "\n".join([head.rstrip() + "\n", *map(section_of, TRAINERS)])
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
