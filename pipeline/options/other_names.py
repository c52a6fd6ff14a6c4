"""The names of options in transformers and TRL, and the settings that are meant."""

from __future__ import annotations

from .table import fields

OURS = {
    "model_name_or_path": "model.path",
    "ref_model": "model.path",
    "torch_dtype": "model.dtype",
    "attn_implementation": "model.attention",
    "dataset_name": "data.files",
    "eval_dataset": "train.eval_cache",
    "truncation_mode": "tokens.prompt_side",
    "loss_type": "train.method",
    "loss_weights": "train.method",
    "beta": "method.beta",
    "rpo_alpha": "method.sft_weight",
    "cpo_alpha": "method.alpha",
    "simpo_gamma": "method.gamma_ratio",
    "f_divergence_type": "method.f_divergence",
    "use_weighting": "method.wpo",
    "per_device_train_batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.batch_size",
    "num_train_epochs": "train.epochs",
    "learning_rate": "train.lr",
    "lr_scheduler_type": "train.schedule",
    "warmup_ratio": "train.warmup",
    "warmup_steps": "train.warmup",
    "optim": "train.optimizer",
    "adam_beta1": "train.beta1",
    "adam_beta2": "train.beta2",
    "bf16": "train.dtype",
    "fsdp": "train.deepspeed",
    "use_peft": "lora.enabled",
    "lora_r": "lora.rank",
    "lora_target_modules": "lora.targets",
    "load_in_4bit": "lora.quantize",
    "eval_steps": "train.eval_every",
    "save_steps": "train.save_every",
    "save_total_limit": "train.keep_last",
    "metric_for_best_model": "train.best",
    "load_best_model_at_end": "train.write_best",
    "early_stopping_patience": "train.patience",
    "resume_from_checkpoint": "train.resume",
    "output_dir": "train.output",
    "report_to": "tracking.trackers",
}


def meant_by(name: str) -> list[str]:
    """The setting that a name of another trainer means, or one of ours without its section."""
    key = name.lstrip("-").replace("-", "_").rpartition(".")[2]
    own = [setting for setting in fields() if setting.rpartition(".")[2] == key]
    if name in own:
        return []
    return [OURS[key]] if key in OURS else own if len(own) == 1 else []
