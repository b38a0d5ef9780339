"""A training step as others make it: transformers' own model, with Liger's kernels, and DeepSpeed with host states.

Each is as careful as its own documentation: sdpa attention, fused AdamW, the fused loss where it has one, layers
recomputed where ours are. Hugging Face's weights, gradients and moments are bf16; DeepSpeed's masters and moments are
float32 in pinned host memory, where its own compiled Adam runs (the first use compiles it, for a minute).
"""

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers.checkpointing import checkpoint_layers
from benchmarks.truth.prediction import Case as Truth
from benchmarks.truth.prediction import huggingface_step
from tightfit.jobs.workload import Workload
from tightfit.models.huggingface.config import config_from_spec
from tightfit.models.spec import ModelSpec
from tightfit.train.deepspeed_engine import load_deepspeed
from tightfit.train.step import ignore

Step = Callable[[], float]
NEEDS = {"huggingface": "transformers", "huggingface+liger": "liger_kernel", "deepspeed": "deepspeed"}
"""What must be installed for whom."""
SETTINGS = {
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
}


def is_installed(who: str) -> bool:
    """Whether `who` can train here."""
    return who not in NEEDS or find_spec(NEEDS[who]) is not None


def with_liger(model: Any) -> None:
    """The same model with Liger's kernels, the fused loss among them."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model)


def make_huggingface(model: str, workload: Workload, device: torch.device, *, checkpointed: bool, liger: bool) -> Step:
    """A step of transformers' model in bf16."""
    truth = Truth(
        model=model,
        sequence_length=workload.sequence_length,
        micro_batch=workload.global_batch,
        precision="pure-bf16",
        checkpoint_every=int(checkpointed),
        implementation="huggingface",
    )
    step = huggingface_step(truth, device, prepare=with_liger if liger else None)

    def run_step() -> float:
        step(ignore)
        return 0.0

    return run_step


def make_deepspeed(workload: Workload, device: torch.device) -> Step:
    """A step of ZeRO-3 on one rank with states and Adam on the host, over transformers' model with Liger's kernels."""
    rows, length, spec = workload.global_batch, workload.sequence_length, workload.spec
    engine = _engine(spec, rows, device)
    tokens = torch.randint(spec.vocab_size, (rows, length), device=device)

    def step() -> float:
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


@lru_cache(maxsize=1)  # minutes are lost by pinning its states again for another length of the rows
def _engine(spec: ModelSpec, rows: int, device: torch.device) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    deepspeed = load_deepspeed(device)
    if not dist.is_initialized():
        alone = torch.distributed.HashStore()  # type: ignore[attr-defined]
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=alone, rank=0, world_size=1)
    config = AutoConfig.for_model(**config_from_spec(spec, dtype="bfloat16"))
    with device:
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    if device.type == "cuda" and find_spec("liger_kernel"):
        with_liger(model)
    checkpoint_layers(model)
    settings = {"train_micro_batch_size_per_gpu": rows, **SETTINGS}
    return deepspeed.initialize(model=model.train(), model_parameters=model.parameters(), config=settings)[0]
