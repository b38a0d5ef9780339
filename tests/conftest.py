"""Shared set-up: one thread (the suite runs beside itself on two cores), no network, and a small corpus.

Programs that tests start inherit the one thread: on tiny shapes a second one only waits, and takes the core of others.

They also find this tree, installed or not, wherever they are started.

Without a GPU, Triton's kernels run in its interpreter. That is settled when a kernel's module is first imported, which
tests of any folder may do: so it is said here.

What is imported when tests begin stays for good: the garbage collector, which otherwise walks over all of it (torch,
transformers) whenever somebody asks it to collect, is told so; until then it does nothing.

A process that only deals tests out to workers (`pytest -n`) runs none, and imports nothing of this.
"""

import atexit
import gc
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [os.environ.get("PYTHONPATH"), str(Path(__file__).parent.parent)])
)

import pytest

from tests.covering import leave_out_others
from tests.optional import pytest_make_collect_report, pytest_runtest_makereport

__all__ = ["pytest_make_collect_report", "pytest_runtest_makereport"]

WORKERS = dict(zip(sys.argv, sys.argv[1:], strict=False)).get("-n", "0")
DEALS_OUT = WORKERS != "0" and "PYTEST_XDIST_WORKER" not in os.environ


def set_up() -> None:
    """Torch and Triton's interpreter as tests want them."""
    import torch

    from tests.interpreter import ignore_overflows, patch_language_once, read_single_elements, share_types
    from tests.slow_halves import compute_in_float32

    torch.set_num_threads(1)
    compute_in_float32()
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        read_single_elements()
        patch_language_once()
        ignore_overflows()
        share_types()


gc.disable()
if not DEALS_OUT:
    set_up()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before `-m "not thorough"` chooses."""
    leave_out_others(items)


def pytest_collection_finish() -> None:
    if not DEALS_OUT:
        from tests.set_aside import keep_set_aside

        keep_set_aside()
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # else extensions complain of what is left when Python ends


SENTENCES = (
    "the quick brown fox jumps over the lazy dog",
    "a model learns to say what it has often seen",
    "numbers such as 3 and 14 and 159 are spelled digit by digit",
    "def add(left, right):\n    return left + right",
    "every document ends where the next one begins",
)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of forty short text files."""
    folder = tmp_path_factory.mktemp("corpus")
    for index in range(40):
        lines = [SENTENCES[(index + shift) % len(SENTENCES)] for shift in range(3 + index % 4)]
        (folder / f"{index:02d}.txt").write_text(f"{index}: " + "\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def token_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tokenized shards and trained tokenizers of the whole suite are kept."""
    return tmp_path_factory.mktemp("token-cache")


@pytest.fixture(scope="session")
def server() -> None:
    """For tests of what forks by itself: the server of forked processes, with what tests need imported."""
    from tests.distributed.group import PRELOADED
    from tightfit.launch.forked import start_server

    start_server(PRELOADED)
