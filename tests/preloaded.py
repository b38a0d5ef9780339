"""What the server of forked processes imports once (`multiprocessing`'s forkserver), so that none of them has to.

A worker has one server, which keeps the list it was first given: so there is one list, which is this module. Names of
transformers are asked for because it imports what they need when asked: most of what a tiny run would take. So is
pyplot, and what programs draw has few dots (tests/few_dots.py).

Ranks of shared groups (tests/distributed/group.py) call functions of the tests' own modules: these too are imported
here, except for those that need a package which is not installed.
"""

from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
from matplotlib import pyplot
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import tests.distributed.piping
import tests.distributed.training
import tests.distributed.victim
import tests.few_dots
import tests.interpreter
import tests.slow_halves
import tests.train.jobs
import tightfit.train.loop

tests.interpreter.read_single_elements()
tests.interpreter.patch_language_once()
tests.interpreter.ignore_overflows()
tests.interpreter.share_types()
tests.slow_halves.compute_in_float32()
tests.few_dots.draw_in_few_dots(pytest.MonkeyPatch())

for path in sorted(Path(__file__).parent.glob("distributed/test_*.py")):
    with suppress(ModuleNotFoundError):
        import_module(f"tests.distributed.{path.stem}")

__all__ = ["AutoTokenizer", "PreTrainedTokenizerFast", "pyplot", "tests", "tightfit"]
