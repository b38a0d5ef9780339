"""The kernels compile for real cards, old and new, on a machine that has none."""

import os
import subprocess
import sys

import pytest

from tests.covering import thorough

WITHOUT_OPTIMISING = {"DISABLE_LLVM_OPT": "1", "DISABLE_PTXAS_OPT": "1"}
"""What compiles so compiles with it, a quarter sooner."""


@pytest.mark.parametrize("variants", [[], thorough(["all"])], ids=["for one card each", "all for both"])
def test_kernels_compile_for_cards_that_are_not_here(variants: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {} if variants else WITHOUT_OPTIMISING
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.launching", "75", "90", *variants]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    lines = [line.split() for line in made.stdout.splitlines()]
    assert_flash_attention_fits(lines[:6])
    del lines[:6]
    rooms = {line[0].rpartition(".")[2] for line in lines}
    updates = {"adamw", "adamw8bit", "adamw_list", "clip_estimate", "gradient_norm"}
    decoding = {"decode_linear", "decode_attention", "greedy", "rotate_store", "paged_attention", "paged_prefill"}
    decoding |= {"low_rank_rows", "top_k_top_p"}
    routed = {"gather_rows", "routed_mlp", "split_sum", "distillation_rows"}
    coded = {"quantized_linear", "packed_rows", "packed_vector", "spqr_linear"}
    newer = {"fp8_quantize", "fp8_mlp", "fp8_vector", "fp8_rows", "rounded_matmul", "few_rows", "packed_blocks"}
    assert rooms == {"row_norm", "glu", "rope", "join_parts"} | updates | decoding | routed | coded | newer
    old, new = ([line[:2] for line in lines if line[2] == target] for target in ("sm_75", "sm_90a"))
    assert len(old) + len(new) == len(lines)
    both = [line for line in new if line[0].rpartition(".")[2] not in newer]
    assert sorted(old) == sorted(both) if variants else not {*map(tuple, old)} & {*map(tuple, both)}


def assert_flash_attention_fits(lines: list[list[str]]) -> None:
    """T4, which has neither bf16 nor asynchronous copies, and H100, within the shared memory a program has there."""
    names, targets, shared_bytes = zip(*lines, strict=True)
    assert names == ("forward_kernel", "key_gradient_kernel", "query_gradient_kernel") * 2
    assert targets == ("sm_75",) * 3 + ("sm_90a",) * 3
    assert all(int(used) <= most for used, most in zip(shared_bytes, [65536] * 3 + [232448] * 3, strict=True))
