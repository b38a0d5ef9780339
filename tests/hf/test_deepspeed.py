"""DeepSpeed ZeRO-3 on two processes, parameters in pieces between their uses, computes what one process computes.

It runs where DeepSpeed is installed: `DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed` (`make install` does
it). Processes talk through gloo: DeepSpeed's own shared-memory operation would be compiled first, for two minutes.
"""

import os
import socket

import pytest
import torch

from tests.hf.models import gradients, make_batch, make_model
from tightfit.hf import accelerate

WORLD = 2
SHARED_MEMORY = "deepspeed_shm_comm"
SETTINGS = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_zero_3(port: int) -> None:
    torch.multiprocessing.spawn(run_rank, args=(port,), nprocs=WORLD)


def run_rank(rank: int, port: int) -> None:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({"DS_ACCELERATOR": "cpu"} | {name: str(value) for name, value in places.items()})
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.ops.__compatible_ops__[SHARED_MEMORY] = False
    deepspeed.init_distributed("gloo")
    for family in ("llama", "qwen3"):  # the head apart, and the head that is the embedding
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
