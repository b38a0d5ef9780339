"""DeepSpeed ZeRO-3 on two processes, parameters in pieces between their uses, computes what one process computes.

It runs where DeepSpeed is installed: `DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed` (`make install` does
it). Processes talk through gloo: DeepSpeed's own shared-memory operation would be compiled first, for two minutes.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.group import Group
from tests.hf.models import gradients, make_batch, make_model
from tightfit.hf import accelerate

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="pip install --no-build-isolation deepspeed")
WORLD = 2
SHARED_MEMORY = "deepspeed_shm_comm"
SETTINGS = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


FAMILIES = ("llama", "qwen3")
"""The head apart, and the head that is the embedding."""


@pytest.mark.thorough
def test_zero_3(tmp_path: Path) -> None:
    with Group(WORLD, tmp_path / "meeting") as pair:
        assert pair.run(run_rank) == [list(FAMILIES)] * WORLD


def run_rank() -> list[str]:
    """Compares each family with one process, and names those that were."""
    rank, compared = dist.get_rank(), []
    os.environ.update({"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank)})
    import deepspeed

    deepspeed.ops.__compatible_ops__[SHARED_MEMORY] = False
    deepspeed.init_distributed("gloo")
    for family in FAMILIES:
        plain = make_model(family)
        (sum(plain(**make_batch(family, seed=each)).loss for each in range(WORLD)) / WORLD).backward()
        model = accelerate(make_model(family))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=SETTINGS)
        out = engine(**make_batch(family, seed=rank))
        assert out.logits is None
        engine.backward(out.loss)
        found = {name: deepspeed.utils.safe_get_full_grad(p) for name, p in model.named_parameters()}
        torch.testing.assert_close(found, gradients(plain), rtol=1e-4, atol=1e-5)
        compared.append(family)
    return compared
