"""What coding the output projection costs: alone, and beside layers in 4 bits by GPTQ.

Rounded to nearest or by GPTQ, in 8 and 4 bits; the same text for all. Appends to benchmarks/results/head_quality.csv;
of SmolLM2-135M-Instruct all rows take about half an hour on two CPU cores.

    python -m benchmarks.head_quality --calibrate wiki.train.txt --test wiki.test.txt
"""

import argparse
from dataclasses import replace

from benchmarks.fit_quality import add_arguments
from benchmarks.recipe_bench import RecipeBench
from tightfit.compress.recipe import Recipe, Step, recipe_of
from tightfit.models.quantized.matrices import HEAD

TABLE = "head_quality"
GROUP = 64
LAYERS = {"bits": 4, "group": GROUP}


def recipes() -> dict[tuple[str, str], Recipe]:
    """By how layers and the projection are coded."""
    found: dict[tuple[str, str], Recipe] = {}
    for bits in (8, 4):
        step = Step(method="rtn", bits=bits, group=GROUP if bits == 4 else 0, layers=(HEAD,))
        found["plain", f"rtn {bits} bits"] = Recipe((step,))
        found["plain", f"gptq {bits} bits"] = Recipe((replace(step, method="gptq"),))
    found["gptq 4 bits", "plain"] = recipe_of("gptq", **LAYERS)
    for bits in (8, 4):
        found["gptq 4 bits", f"gptq {bits} bits"] = recipe_of("gptq", head=bits, **LAYERS)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_arguments(parser)
    parser.add_argument("--samples", type=int, default=16, help="calibration rows of GPTQ")
    arguments = parser.parse_args()
    bench = RecipeBench(arguments, TABLE)
    for (layers, head), recipe in recipes().items():
        bench.measure(recipe, layers=layers, head=head)


if __name__ == "__main__":
    main()
