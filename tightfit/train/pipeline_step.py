"""What a training step has to know of a pipeline: who counts which parameters, and whose tensors a checkpoint takes.

Every rank of a pipeline has an optimizer of its own parameters. The step's loss is known to the last stage and its
gradient norm is the sum over stages, so both are added up over all processes (step.py), and every rank clips by the
same norm and stops at the same loss. A tied embedding, of which two stages hold a copy, counts once.
"""

from torch import nn

from tightfit.parallel.pipeline import Pipeline
from tightfit.train.optimizer.adamw import MasterAdamW

TIED = "embed.weight"


def counting(optimizer: MasterAdamW, module: nn.Module) -> MasterAdamW:
    """The optimizer, told which of its parameters count, and that other stages have others."""
    if isinstance(module, Pipeline):
        optimizer.stages = module.layout.pipeline
        optimizer.copied = frozenset({TIED}) if module.holds_a_copy else frozenset()
    return optimizer
