"""Our kernels in the Hugging Face Trainer.

python examples/hf_trainer.py MODEL   # a Hugging Face directory or a name on the hub; without one a tiny Llama
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

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


def rows() -> list[dict[str, Any]]:
    """The conversations as bytes, which need no tokenizer."""
    chats = (json.loads(line)["messages"] for line in CHATS.read_text(encoding="utf-8").splitlines())
    texts = ["\n".join(message["content"] for message in chat).encode()[:100] for chat in chats]
    return [{"input_ids": list(text.ljust(100)), "labels": list(text.ljust(100))} for text in texts]


def main(model_name: str | None = None, steps: int = 3) -> float:
    """Train `steps` steps; returns the last loss."""
    model = tiny_model() if model_name is None else transformers.AutoModelForCausalLM.from_pretrained(model_name)
    tightfit.hf.accelerate(model)  # the one line
    with tempfile.TemporaryDirectory() as output:
        arguments = transformers.TrainingArguments(
            output,
            max_steps=steps,
            per_device_train_batch_size=2,
            report_to=[],
            save_strategy="no",
            use_cpu=not torch.cuda.is_available(),
        )
        return transformers.Trainer(model, arguments, train_dataset=rows()).train().training_loss


if __name__ == "__main__":
    print(f"loss {main(sys.argv[1] if len(sys.argv) > 1 else None):.3f}")
