"""Accelerated Hugging Face models on the GPU: as near to float32 as the unpatched model of that dtype, or nearer."""

import copy

import pytest
import torch
from transformers import PreTrainedModel

from tests.gpu.test_decoder import error, worst
from tests.hf.models import FAMILIES, gradients, make_batch, make_model
from tightfit.hf import accelerate

CUDA = torch.device("cuda")
ROUTED = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss")


def loss_and_gradients(
    model: PreTrainedModel, family: str, device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    batch = {name: x.to(device) for name, x in make_batch(family, batch=3, length=37).items()}
    loss = model(**batch).loss
    loss.backward()
    found = gradients(model)
    return loss.detach(), [found[name] for name in sorted(found)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_error_is_the_unpatched_models_or_less(family: str, dtype: torch.dtype) -> None:
    truth_loss, truth = loss_and_gradients(make_model(family), family, torch.device("cpu"))
    plain = make_model(family).to(CUDA, dtype)
    ours = accelerate(copy.deepcopy(plain))
    loss, grads = loss_and_gradients(plain, family, CUDA)
    our_loss, our_grads = loss_and_gradients(ours, family, CUDA)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    assert error(our_loss, truth_loss) <= 1.1 * error(loss, truth_loss) + tolerance
    assert all(gradient.isfinite().all() for gradient in our_grads)
    if family in ROUTED and dtype == torch.bfloat16:
        return  # a router's choice may flip in bf16, which is a different function
    assert worst(our_grads, truth) <= 1.2 * worst(grads, truth) + tolerance
