"""What fp8 matmuls cost in loss: the same steps on real text in bf16 and in fp8, scaled per tensor and per row.

The model, the text and the loop are convergence.py's; on a CPU products of 8-bit codes are computed in float32. Runs in
bf16 drift apart by rounding alone: one whose layers work in two tiles, exact but in another order, shows how far.

    python -m benchmarks.fp8_convergence --results DIR
"""

from benchmarks.convergence import Study, Variant, run_study
from tightfit.jobs.levers import Levers

STUDY = Study(
    name="fp8_convergence",
    column="matmul",
    title="natively and in fp8",
    variants={
        "native": Variant(),
        "native, in tiles": Variant(Levers(tiles=2)),
        "fp8-tensor": Variant(Levers(matmul="fp8-tensor")),
        "fp8-row": Variant(Levers(matmul="fp8-row")),
    },
)

if __name__ == "__main__":
    run_study(STUDY)
