"""The kernels compile for real cards, old and new, on a machine that has none."""

import os
import subprocess
import sys


def test_kernels_compile_for_cards_that_are_not_here():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.launching", "75", "90"]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    lines = [line.split() for line in made.stdout.splitlines()]
    rooms = {line[0].removeprefix("tightfit.kernels.") for line in lines}
    assert rooms == {"row_norm", "glu", "rope", "adamw", "adamw8bit"}
    assert [line[2] for line in lines] == ["sm_75"] * (len(lines) // 2) + ["sm_90a"] * (len(lines) // 2)
