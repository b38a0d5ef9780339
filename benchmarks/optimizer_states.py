"""What narrower optimizer states cost: the same steps on real text in every format, their curves and bytes a parameter.

torchao's and bitsandbytes' 8-bit AdamW run beside ours where they are installed. The last two runs have bf16 weights
and no masters, rounded to nearest and stochastically; these are left out on CPUs, most of which have no instructions
for bf16. The model, the text and the loop are convergence.py's.

    python -m benchmarks.optimizer_states --results DIR
"""

from importlib.util import find_spec

import torch

from benchmarks.convergence import Study, Variant, run_study
from benchmarks.peers.updaters import PEERS
from tightfit.jobs.levers import Levers

OTHERS = {f"8bit of {peer}": Variant(peer=peer) for peer in PEERS if find_spec(peer) and torch.cuda.is_available()}
STUDY = Study(
    name="optimizer_states",
    column="states",
    title="states in other formats",
    shows_bytes=True,
    variants={
        "fp32": Variant(),
        "bf16": Variant(Levers(optimizer_states="bf16")),
        "8bit": Variant(Levers(optimizer_states="8bit")),
        **OTHERS,
        "factored": Variant(Levers(optimizer_states="factored")),
        "fp32, updates in backward": Variant(Levers(update_in_backward=True)),
        "bf16 weights, fp32": Variant(Levers(optimizer_states="fp32"), pure=True),
        "bf16 weights, fp32, stochastic": Variant(Levers(optimizer_states="fp32", rounding="stochastic"), pure=True),
    },
)

if __name__ == "__main__":
    run_study(STUDY)
