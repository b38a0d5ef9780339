"""Words of other trainers (Hugging Face, DeepSpeed, PEFT, Axolotl, vLLM), and the field of a job that sets the same."""

SET_BY = {
    "model": ("base_model", "model_name", "model_name_or_path", "pretrained_model_name_or_path"),
    "tokenizer.source": ("tokenizer_name", "tokenizer_path"),
    "data.train": ("dataset", "datasets", "dataset_name", "dataset_path", "train_data", "train_file", "train_files"),
    "data.held_out": ("eval_data", "eval_file", "test_size", "val_data", "val_set_size", "validation_file"),
    "data.field": ("dataset_text_field", "text_column", "text_field"),
    "data.sequence_length": (
        *("block_size", "context_length", "cutoff_len", "max_length", "max_seq_len", "max_seq_length"),
        *("model_max_length", "seq", "seq_len", "seq_length", "sequence_len"),
    ),
    "data.pack": ("packing", "sample_packing"),
    "output": ("out", "out_dir", "output_dir", "save_dir"),
    "steps": ("max_iters", "max_steps", "max_train_steps", "num_steps", "num_train_steps", "train_steps"),
    "epochs": ("max_epochs", "num_epochs", "num_train_epochs"),
    "global_batch": (
        *("batch", "batch_size", "global_batch_size", "train_batch_size"),
        *("accumulation", "accumulation_steps", "grad_accum", "gradient_accumulation", "gradient_accumulation_steps"),
    ),
    "layout.micro_batch": (
        *("device_batch_size", "micro_batch_size", "per_device_batch_size", "per_device_train_batch_size"),
        "train_micro_batch_size_per_gpu",
    ),
    "layout.zero": ("fsdp", "zero_optimization", "zero_stage"),
    "layout": (
        *("context_parallel", "context_parallel_size", "cp", "pipeline_model_parallel_size", "pipeline_parallel"),
        *(
            "pipeline_parallel_size",
            "pp",
            "tensor_model_parallel_size",
            "tensor_parallel",
            "tensor_parallel_size",
            "tp",
        ),
    ),
    "precision": ("bf16", "dtype", "fp16", "mixed_precision", "torch_dtype"),
    "optimizer.lr": ("learning_rate", "max_lr", "peak_lr"),
    "optimizer.betas": ("adam_beta1", "adam_beta2", "beta1", "beta2"),
    "optimizer.eps": ("adam_epsilon", "epsilon"),
    "optimizer.clip_norm": ("clip_grad", "clip_grad_norm", "grad_clip", "gradient_clipping", "max_grad_norm"),
    "schedule.kind": ("lr_schedule", "lr_scheduler", "lr_scheduler_type", "scheduler"),
    "schedule.warmup_steps": ("num_warmup_steps", "warmup", "warmup_ratio"),
    "adapter": ("lora", "lora_config", "peft", "peft_config", "qlora"),
    "adapter.rank": ("lora_r", "lora_rank", "r"),
    "adapter.alpha": ("lora_alpha",),
    "adapter.dropout": ("lora_dropout",),
    "adapter.targets": ("lora_target_modules", "target_modules"),
    "adapter.bits": ("load_in_4bit", "load_in_8bit"),
    "levers.checkpoint_every": ("activation_checkpointing", "gradient_checkpointing"),
    "evaluation.every": ("eval_every", "eval_interval", "eval_steps"),
    "saving.every": ("save_every", "save_interval", "save_steps"),
    "saving.keep": ("save_total_limit",),
    "logging.every": ("log_every", "log_interval", "logging_steps"),
}
"""The words by field."""
_FIELDS = {word: field for field, words in SET_BY.items() for word in words}


def field_of(word: str) -> str | None:
    """The field of a job that sets what others call `word`; None for words that nobody here knows."""
    return _FIELDS.get(word.lower().replace("-", "_"))
