"""The code of docs/huggingface.md for the Trainer, PEFT and TRL, run as it stands on a tiny model."""

import re
import runpy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "docs" / "huggingface.md").read_text(encoding="utf-8").split("## In the trainers people use")[1]
BLOCKS = re.findall(r"^```python\n(.*?)^```", SECTION.split("\n## ")[0], flags=re.DOTALL | re.MULTILINE)
NEEDS = ("accelerate", "peft", "trl")


@pytest.mark.parametrize(("package", "block"), list(zip(NEEDS, BLOCKS, strict=True)), ids=NEEDS)
def test_a_block_runs_as_it_stands(package: str, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec(package) is None:
        pytest.skip(f"pip install {package}")
    example: dict[str, Any] = runpy.run_path(str(ROOT / "examples" / "hf_trl.py"))
    rows = runpy.run_path(str(ROOT / "examples" / "hf_trainer.py"))["rows"]()
    tokenizer, model = example["tiny_tokenizer"](), example["tiny_model"]()
    model.resize_token_embeddings(len(tokenizer))
    monkeypatch.chdir(tmp_path)
    before = model.lm_head.weight.detach().clone()
    exec(compile(block, "docs/huggingface.md", "exec"), {"model": model, "tokenizer": tokenizer, "rows": rows})
    if package == "peft":
        assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    else:
        assert not before.equal(model.lm_head.weight)
