"""The exported DeepSpeed file and the arguments beside it, in the Hugging Face Trainer that compares the two."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.plan.questions import planned
from tests.programs import call_forked
from tightfit.exports.files import export

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="pip install --no-build-isolation deepspeed")


@pytest.mark.thorough
def test_the_trainer_takes_both_files_and_trains(tmp_path: Path) -> None:
    plan = planned("tiny-llama", "T4", 16, 4, "levers.offload=optimizer", "layout.micro_batch=2", precision="fp32").plan
    export(plan, f"deepspeed={tmp_path / 'deepspeed.json'}")
    export(plan, f"trainer={tmp_path / 'trainer.json'}")
    code, stdout, stderr = call_forked(tmp_path, train, str(tmp_path))
    assert code == 0, stderr[-3000:]
    assert "trained 2 steps with ZeRO 2" in stdout


def train(folder: str) -> None:
    """Two steps with the files in `folder`, in a process of its own."""
    import os

    os.environ.update(
        DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
    )
    import deepspeed
    import torch
    import transformers

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it is compiled first, for two minutes
    from tests.hf.models import make_model

    rows: Any = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in torch.randint(3, 90, (8, 16))]
    given = json.loads(Path(folder, "trainer.json").read_text())
    arguments = transformers.TrainingArguments(
        folder,
        deepspeed=f"{folder}/deepspeed.json",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        **{**given, "max_steps": 2},
    )
    trainer = transformers.Trainer(make_model("llama"), arguments, train_dataset=rows)
    assert trainer.train().global_step == 2
    config = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    print(f"trained 2 steps with ZeRO {config['zero_optimization']['stage']}")
