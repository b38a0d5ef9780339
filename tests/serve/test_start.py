"""What cannot be served beside a model is told before the model's weights are read."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import SHAPE
from tightfit.errors import UserError
from tightfit.models.huggingface.config import config_from_spec
from tightfit.serve import start
from tightfit.serve.config import EngineConfig
from tightfit.serve.start import start_engine

BESIDE: dict[str, tuple[dict[str, Any], str]] = {
    "no draft": ({"draft": "absent"}, "there is no model at 'absent'"),
    "a draft of other tokens": ({"draft": "other"}, "the draft model has 40 tokens and the model 300; give a draft"),
    "no adapter": ({"adapters": {"poet": Path("absent")}}, "absent has no adapter_config.json; name the directory"),
    "too many layers": ({"config": EngineConfig(speculation="skip", skipped_layers=99)}, "skip is 99, but a model of"),
}


@pytest.mark.parametrize(("beside", "sentence"), BESIDE.values(), ids=BESIDE)
def test_what_cannot_go_beside_the_model_is_told_before_it_is_loaded(
    beside: dict[str, Any], sentence: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_model(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(start, "load_model", no_model)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    config = config_from_spec(replace(SHAPE, vocab_size=40), dtype="float32")
    (tmp_path / "other/config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=sentence):
        start_engine(str(directory), **({"config": EngineConfig()} | beside), device="cpu")
