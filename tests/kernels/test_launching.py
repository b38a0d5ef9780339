"""The kernels compile for real cards, old and new, on a machine that has none."""

import os
import subprocess
import sys


def test_kernels_compile_for_cards_that_are_not_here() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.launching", "75", "90"]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    lines = [line.split() for line in made.stdout.splitlines()]
    rooms = {line[0].removeprefix("tightfit.kernels.") for line in lines}
    updates = {"adamw", "adamw8bit", "adamw_list", "gradient_norm"}
    decoding = {"decode_linear", "decode_attention", "greedy", "rotate_store", "paged_attention", "paged_prefill"}
    routed = {"gather_rows", "routed_mlp", "split_sum"}
    coded = {"quantized_linear", "packed_rows", "packed_vector", "fp8_quantize", "fp8_mlp", "fp8_vector", "fp8_rows"}
    assert rooms == {"row_norm", "glu", "rope", "join_parts"} | updates | decoding | routed | coded
    both = [line for line in lines if "fp8" not in line[0]]
    assert [line[2] for line in both] == ["sm_75"] * (len(both) // 2) + ["sm_90a"] * (len(both) // 2)
    assert {line[2] for line in lines if "fp8" in line[0]} == {"sm_90a"}
