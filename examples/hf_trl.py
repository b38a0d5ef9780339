"""Our kernels in TRL's SFTTrainer.

python examples/hf_trl.py MODEL   # a Hugging Face directory or a name on the hub; without one a tiny Llama
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from trl import SFTConfig, SFTTrainer

import tightfit.hf

CHATS = Path(__file__).parent / "data" / "chats.jsonl"


def tiny_model() -> Any:
    """A Llama of a few thousand weights."""
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    return transformers.LlamaForCausalLM(config)


def tiny_tokenizer() -> Any:
    """A tokenizer trained on the conversations."""
    from tightfit.models.text.tokenizer import train_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        train_tokenizer(CHATS.read_text(encoding="utf-8").splitlines(), 256 + 8).save(folder)
        return transformers.AutoTokenizer.from_pretrained(folder)


def main(model_name: str | None = None, steps: int = 3) -> float:
    """Train `steps` steps; returns the last loss."""
    if model_name is None:
        tokenizer, model = tiny_tokenizer(), tiny_model()
        model.resize_token_embeddings(len(tokenizer))
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model_name)
        model = transformers.AutoModelForCausalLM.from_pretrained(model_name)
    tightfit.hf.accelerate(model)  # the one line
    chats = datasets.Dataset.from_json(str(CHATS))
    with tempfile.TemporaryDirectory() as output:
        arguments = SFTConfig(
            output,
            max_steps=steps,
            per_device_train_batch_size=2,
            max_length=100,
            report_to=[],
            save_strategy="no",
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = SFTTrainer(model, arguments, train_dataset=chats, processing_class=tokenizer)
        return trainer.train().training_loss


if __name__ == "__main__":
    print(f"loss {main(sys.argv[1] if len(sys.argv) > 1 else None):.3f}")
