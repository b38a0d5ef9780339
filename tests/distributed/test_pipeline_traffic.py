"""What pipeline ranks send in a step: hidden states forward, their gradients back, as the planner counts them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.distributed.group import Group
from tests.distributed.piping import DEEP, Piped
from tests.distributed.training import CPU, build, micro_batches
from tests.parallel.test_data import Traffic
from tightfit.parallel.mesh import make_mesh
from tightfit.parallel.ranks import Ranks
from tightfit.train.precision import LossScale
from tightfit.train.step import train_step

LENGTH = 16
CASES = {
    "gpipe": Piped(pipeline=4, schedule="gpipe"),
    "1f1b": Piped(pipeline=4),
    "zero-bubble": Piped(pipeline=4, schedule="zero-bubble"),
    "interleaved": Piped(pipeline=2, schedule="interleaved", stages_per_rank=2),
    "tensor": Piped(pipeline=2, tensor=2, sequence_parallel=False),
    "tensor-split-stream": Piped(pipeline=2, tensor=2),
    "tied": Piped(spec=replace(DEEP, tied=True), pipeline=4),
}


def sent_elements(case: Piped) -> tuple[int, int]:
    """Which pipeline rank this is, and what it sends to others of its pipeline in the second step."""
    mesh = make_mesh(case.layout, "cpu")
    ranks = Ranks.of(mesh)
    _, module, optimizer = build(case, mesh)
    for step in range(2):
        batches = micro_batches(case, step, ranks.rank)
        with Traffic() as traffic:
            train_step(module, optimizer, batches, CPU, 1e-3, LossScale(), ranks=ranks)
    return mesh.get_local_rank("pipeline"), traffic.elements["send", torch.float32]


@pytest.mark.parametrize("name", CASES)
def test_ranks_send_a_stream_each_way(group: Callable[[int], Group], name: str) -> None:
    case = CASES[name]
    layout, spec = case.layout, case.spec
    stages, passes = layout.pipeline * layout.stages_per_rank, case.rows // case.micro_batch
    split = layout.tensor if layout.sequence_parallel else 1
    stream = case.micro_batch * LENGTH * spec.hidden_size // split
    for rank, sent in group(layout.ranks).run(sent_elements, case):
        own = range(rank, stages, layout.pipeline)
        ways = sum((stage < stages - 1) + (stage > 0) for stage in own)
        tied = spec.vocab_size * spec.hidden_size if spec.tied and rank in (0, layout.pipeline - 1) else 0
        assert sent == passes * ways * stream + tied, rank
