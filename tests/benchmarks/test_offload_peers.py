"""benchmarks/offload_peers.py runs, which it does only while our losses are DeepSpeed's."""

from importlib.util import find_spec

import pytest

from benchmarks import offload_peers
from tightfit.train.deepspeed_engine import INSTALL


@pytest.mark.thorough
@pytest.mark.usefixtures("server")
@pytest.mark.skipif(find_spec("deepspeed") is None, reason=INSTALL)
def test_two_ranks_with_everything_on_the_host_lose_as_deepspeed_s_do() -> None:
    case = offload_peers.Case("tiny-llama", sequence_length=16, rows=1, ranks=2, precision="fp32", steps=2)
    found = offload_peers.compare(case)
    assert [len(each.losses) for each in found.values()] == [4, 4]
    row = offload_peers.row_of(case, found)
    assert float(row["time_ratio"]) > 0
    assert row["tightfit_gpu_gib"] == "0.000"
