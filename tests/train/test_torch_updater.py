"""The update of a list in one launch against torch's fused AdamW, where some steps do not reach some weights."""

import torch

from tightfit.jobs.job import Optimizer
from tightfit.train.optimizer.updaters import TorchUpdater

SHAPES = [(3, 5), (7,), (2, 2)]
UNREACHED = {1: 1, 3: 2}
"""Step → the weight that has no gradient then."""


def test_weights_that_missed_steps_are_updated_by_their_own_counts() -> None:
    torch.manual_seed(0)
    start = [torch.randn(shape) for shape in SHAPES]
    ours, torchs = (TorchUpdater([x.clone() for x in start], Optimizer(lr=1e-2), 0.1) for _ in range(2))
    factor = torch.tensor(0.5)
    for step in range(5):
        gradients = [None if UNREACHED.get(step) == i else torch.randn(shape) for i, shape in enumerate(SHAPES)]
        ours._triton_step(gradients, 1e-2, factor)
        torchs.update([None if g is None else g.clone() for g in gradients], None, 1e-2, factor)
        ours.counts = list(torchs.counts)
    assert torchs.counts == [5, 4, 4]
    for index, before in enumerate(start):
        assert ours.step(index) == torchs.step(index) == torchs.counts[index]
        assert torch.allclose(ours.weights[index], torchs.weights[index], rtol=1e-5, atol=1e-6)
        assert (ours.weights[index] - before).abs().max() > 1e-2
        for moment, found in ours.states(index).items():
            assert torch.allclose(found, torchs.states(index)[moment], rtol=1e-5, atol=1e-7)
    ours.set_step(1, torch.tensor(9.0))
    assert ours.counts == [5, 9, 4]
