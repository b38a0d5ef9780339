"""Accelerated models inside the trainers people use: transformers.Trainer, PEFT adapters, TRL's SFTTrainer."""

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.hf.models import VOCABULARY, gradients, make_batch, make_model, make_twins
from tightfit.hf import accelerate, undo

pytestmark = pytest.mark.skipif(find_spec("accelerate") is None, reason="pip install accelerate")
ROWS = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in torch.randint(3, 90, (12, 11))]
COMMON: dict[str, Any] = {
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "save_strategy": "no",
    "disable_tqdm": True,
    "seed": 3,
}


def dataset(rows: list[dict[str, Any]]) -> Any:
    """Imported here, as trainers are where they are used: that takes seconds, of the worker that runs this alone."""
    import datasets

    return datasets.Dataset.from_list(rows)


def losses(trainer: "transformers.Trainer") -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer(tmp_path: Path) -> None:
    """Real steps with gradient accumulation (the loss's divisor is the trainer's then) and checkpointed layers."""
    made = {}
    for name, model in zip(("plain", "ours"), make_twins("llama"), strict=True):
        options = transformers.TrainingArguments(
            str(tmp_path / name), gradient_accumulation_steps=2, gradient_checkpointing=True, **COMMON
        )
        trainer = transformers.Trainer(model, options, train_dataset=dataset(ROWS))
        made[name] = losses(trainer)
    assert len(made["ours"]) == 3
    np.testing.assert_allclose(made["ours"], made["plain"], rtol=1e-4)


def test_trainer_evaluation_and_metrics(tmp_path: Path) -> None:
    """Metrics get logits; an evaluation of the loss alone makes none."""
    seen: dict[str, dict[str, float]] = {}
    for name, model in zip(("plain", "ours"), make_twins("llama"), strict=True):
        heads: list[int] = []
        model.lm_head.register_forward_hook(lambda module, args, out, heads=heads: heads.append(out.ndim))
        for metrics in (None, lambda pair: {"accuracy": float((pair.predictions.argmax(-1) == pair.label_ids).mean())}):
            trainer = transformers.Trainer(
                model,
                transformers.TrainingArguments(str(tmp_path), **COMMON),
                eval_dataset=dataset(ROWS),
                compute_metrics=metrics,
            )
            seen[name] = {k: v for k, v in trainer.evaluate().items() if k in ("eval_loss", "eval_accuracy")}
            if name == "ours" and metrics is None:
                assert set(heads) == {0}
    assert set(seen["ours"]) == {"eval_loss", "eval_accuracy"}
    assert seen["ours"] == pytest.approx(seen["plain"], rel=1e-5)


@pytest.mark.parametrize("targets", [["q_proj", "gate_proj", "up_proj", "down_proj"], ["q_proj", "lm_head"]])
@pytest.mark.parametrize("wrapped_first", [True, False])
def test_adapters(targets: list[str], wrapped_first: bool) -> None:
    plain = make_model("llama")
    ours = copy.deepcopy(plain)
    if not wrapped_first:
        accelerate(ours)
    wrapped = [with_adapters(model, target_modules=targets) for model in (plain, ours)]
    assert accelerate(wrapped[1]) is wrapped[1]
    batch = make_batch("llama")
    made = [model(**batch) for model in wrapped]
    assert made[1].logits is None
    torch.testing.assert_close(made[1].loss, made[0].loss, rtol=1e-5, atol=1e-5)
    for out in made:
        out.loss.backward()
    expected = gradients(wrapped[0])
    assert any("lora_B" in name for name in expected)
    torch.testing.assert_close(gradients(wrapped[1]), expected, rtol=1e-4, atol=1e-5)
    assert undo(wrapped[1]) is wrapped[1]
    assert torch.equal(wrapped[1](**batch).logits, wrapped[0](**batch).logits)


def with_adapters(model: PreTrainedModel, **options: Any) -> Any:
    """Adapters that do something: the B of LoRA starts at zero otherwise."""
    peft = pytest.importorskip("peft", reason="pip install peft")
    torch.manual_seed(7)
    return peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **options))


def test_a_head_saved_whole_beside_adapters() -> None:
    plain, ours = make_twins("qwen2")
    options = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    wrapped = [with_adapters(model, **options) for model in (plain, ours)]
    for model in wrapped:
        model(**make_batch("qwen2")).loss.backward()
    expected = gradients(wrapped[0])
    assert any("modules_to_save" in name for name in expected)
    torch.testing.assert_close(gradients(wrapped[1]), expected, rtol=1e-4, atol=1e-5)


def test_sft_trainer(tmp_path: Path) -> None:
    trl: Any = pytest.importorskip("trl", reason="pip install trl")

    made = {}
    for name, model in zip(("plain", "ours"), make_twins("qwen3"), strict=True):
        options = trl.SFTConfig(
            str(tmp_path / name),
            max_length=16,
            bf16=False,
            dataset_num_proc=None,
            gradient_checkpointing=False,
            **COMMON,
        )
        texts = dataset([{"text": f"w{i} w{i + 1} w{2 * i} w7 w8"} for i in range(12)])
        made[name] = losses(trl.SFTTrainer(model, options, train_dataset=texts, processing_class=words()))
    assert len(made["ours"]) == 3
    np.testing.assert_allclose(made["ours"], made["plain"], rtol=1e-4)


def words() -> PreTrainedTokenizerFast:
    """A tokenizer of words w3 … w90."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
