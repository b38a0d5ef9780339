"""Right files of every kind, made once, small: what cases change."""

import json
import pickle
import warnings
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save

from tests.plan.questions import planned
from tests.train.jobs import tiny_job
from tightfit.models.decoder import Decoder
from tightfit.models.files.sharded_weights import FOLDER, weights_of
from tightfit.models.gguf.model import write_gguf
from tightfit.models.initialisation import init_weights
from tightfit.models.saving import write_model
from tightfit.models.spec import ModelSpec
from tightfit.models.text.tokenizer import Tokenizer, train_tokenizer

SPEC = ModelSpec(
    family="llama",
    vocab_size=320,
    hidden_size=16,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=8,
    mlp_size=24,
    max_positions=64,
    tied=True,
)
TEXTS = ("the quick brown fox jumps over the lazy dog", "numbers such as 3 and 14", "def add(a, b):\n    return a + b")
CHAT = [{"role": "user", "content": "what colour?"}, {"role": "assistant", "content": "green it is"}]
JOB: dict[str, Any] = {
    "model": {"source": "tiny-llama", "weights": "random", "shape": {"layers": 2}},
    "tokenizer": {"source": "train", "vocab_size": 320},
    "data": {"train": ["notes.txt"], "held_out": 0.1, "sequence_length": 32, "cache": "cache"},
    "output": "runs/x",
    "steps": 5,
    "global_batch": 4,
    "layout": {"micro_batch": 2, "data": 1},
    "precision": "fp32",
    "optimizer": {"lr": 5e-3, "betas": [0.9, 0.95]},
    "schedule": {"kind": "cosine", "warmup_steps": 1},
    "levers": {"checkpoint_every": 1},
    "saving": {"every": 1, "keep": 2},
    "evaluation": {"prompts": ["a"]},
}


class Materials:
    """A folder of right files; each is made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make_all(self) -> None:
        """So that processes forked from this one find everything made."""
        for name, made in vars(type(self)).items():
            if isinstance(made, cached_property) and (name != "parquet" or find_spec("pyarrow")):
                getattr(self, name)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return train_tokenizer(TEXTS * 3, 290)

    @cached_property
    def model(self) -> Path:
        """A Hugging Face directory."""
        torch.manual_seed(0)
        made = Decoder(SPEC)
        init_weights(made)
        folder = self.folder / "model"
        folder.mkdir()
        write_model(folder, made, self.tokenizer)
        write_gguf(made, self.tokenizer, self.folder / "model.gguf", "fp32")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save(weights_of(made), checkpoint_id=self.folder / "pieces" / FOLDER, no_dist=True)
        return folder

    @cached_property
    def gguf(self) -> bytes:
        assert self.model
        return (self.folder / "model.gguf").read_bytes()

    @cached_property
    def pieces(self) -> Path:
        """A checkpoint in pieces."""
        assert self.model
        return self.folder / "pieces"

    @cached_property
    def run(self) -> Path:
        """A run of two steps."""
        from tightfit.train.loop import run_job

        corpus = self.folder / "corpus"
        corpus.mkdir()
        for index in range(8):
            (corpus / f"{index}.txt").write_text("\n".join(TEXTS) * 3)
        shape = {"layers": 1, "hidden_size": 16, "mlp_size": 24, "heads": 2, "kv_heads": 1, "head_dim": 8}
        model = {"source": "tiny-llama", "shape": shape}
        job = tiny_job(self.folder / "run", corpus, self.folder / "cache", steps=2, model=model, saving={"every": 1})
        run_job(job, quiet=True)
        return job.output

    @cached_property
    def plan(self) -> dict[str, Any]:
        """A plan as JSON."""
        return json.loads(json.dumps(planned("tiny-llama", "8xH200", 256, 8).plan.to_json()))

    @cached_property
    def parquet(self) -> bytes:
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table({"text": list(TEXTS) * 20, "messages": [CHAT] * 60, "n": list(range(60))})
        pyarrow.parquet.write_table(table, self.folder / "rows.parquet")
        return (self.folder / "rows.parquet").read_bytes()

    @cached_property
    def index(self) -> Any:
        """The index of pieces, unpickled: it is our own."""
        return pickle.loads((self.pieces / FOLDER / ".metadata").read_bytes())

    @cached_property
    def job_text(self) -> str:
        import yaml

        return yaml.safe_dump(JOB, sort_keys=False)
