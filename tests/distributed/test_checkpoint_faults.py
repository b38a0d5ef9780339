"""What a checkpoint in pieces cannot do is one sentence, on every rank, and leaves the checkpoint before it."""

import resource
from collections.abc import Callable
from errno import ENOSPC
from os import strerror
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from tests.covering import sampled
from tests.distributed.group import Group
from tests.distributed.test_failures import launch
from tests.distributed.test_runs import run_fields, write_again
from tests.train.jobs import checkpoint_files, tiny_job
from tightfit.errors import UserError
from tightfit.jobs.job import Job
from tightfit.models.loading import load_model
from tightfit.models.resolve import checkpoints_of
from tightfit.models.text.tokenizer import Tokenizer
from tightfit.train.checkpoints.sharded import PieceWriter
from tightfit.train.deepspeed_engine import refuse_what_deepspeed_cannot

Make = Callable[[int], Group]
SMALL = {"source": "tiny-llama", "shape": {"layers": 2, "hidden_size": 32, "mlp_size": 48}}
FEW_BYTES = 50_000, 70_000
"""More than the files that are not in pieces have, less than a rank's pieces; of the second number torch alone would
not say what was wrong."""


@pytest.fixture
def make(tmp_path: Path, corpus: Path, token_cache: Path) -> Callable[..., Job]:
    def made(name: str = "run", **changes: Any) -> Job:
        fields = {"layout": {"data": 2, "zero": 3, "micro_batch": 1}, "evaluation": {"max_rows": 1}, "steps": 2}
        fields |= {"model": SMALL, "saving": {"every": 1, "keep": 3, "sharded": True}}
        return tiny_job(tmp_path / name, corpus, token_cache, **(fields | changes))

    return made


def refused(fields: dict[str, Any], options: dict[str, Any], largest_file_bytes: int | None = None) -> str:
    """The sentence of a run; no file may be larger than so many bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file_bytes or soft, hard))
    try:
        run_fields(fields, options)
    except UserError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return "nothing was wrong"


def refused_tokenizer(fields: dict[str, Any], options: dict[str, Any]) -> str:
    """The sentence of a run whose disk has no room for the tokenizer, which the first rank alone writes."""
    with patch.object(Tokenizer, "save", side_effect=OSError(ENOSPC, strerror(ENOSPC))):
        return refused(fields, options)


@pytest.mark.parametrize("limit", FEW_BYTES)
def test_what_cannot_be_written_in_the_background_is_told_by_all(
    group: Make, make: Callable[..., Job], limit: int
) -> None:
    job = make(model={"source": "tiny-llama"})
    group(2).run(run_fields, job.model_dump(mode="json"), {"stop_after": 1})
    assert [path.name for path in checkpoints_of(job.output)] == ["step-00000001"]
    found = group(2).run(refused, job.model_dump(mode="json"), {"resume": True}, limit)
    assert all("cannot write checkpoint" in sentence and "File too large" in sentence for sentence in found), found
    assert all(
        sentence.endswith("the last good checkpoint is " + str(checkpoints_of(job.output)[0])) for sentence in found
    )
    assert [path.name for path in (job.output / "checkpoints").iterdir()] == ["step-00000001"]
    assert load_model(str(job.output)).model.spec.layers > 1


@sampled(1)
@pytest.mark.parametrize("limit", [30_000, 50_000, 70_000, 100_000, 150_000])
def test_torch_does_not_hide_why_a_piece_could_not_be_written(tmp_path: Path, limit: int) -> None:
    """Of some sizes its archive of a tensor says which byte it had come to, and not what the disk had said."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    tensors = {f"of {rows} rows": torch.zeros(rows, 30) for rows in range(1, 402, 50)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(CheckpointException) as told, pytest.warns(UserWarning, match="single process"):
            save(tensors, storage_writer=PieceWriter(tmp_path / "pieces"), no_dist=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [str(error) for error, _ in told.value.failures.values()] == ["[Errno 27] File too large"]


@pytest.mark.parametrize("sharded", [True, False])
def test_what_the_first_rank_cannot_begin_is_told_by_all(group: Make, make: Callable[..., Job], sharded: bool) -> None:
    """The tokenizer, which it alone writes: the others do not wait for their timeout."""
    job = make(saving={"every": 1, "sharded": sharded})
    group(2).run(run_fields, job.model_dump(mode="json"), {"stop_after": 1})
    before = checkpoint_files(checkpoints_of(job.output)[0])
    found = group(2).run(refused_tokenizer, job.model_dump(mode="json"), {"resume": True})
    assert found[0] == found[1]
    assert (
        "step-00000002: No space left on device; make room or change `output`; the last good checkpoint is" in found[0]
    )
    assert [path.name for path in (job.output / "checkpoints").iterdir()] == ["step-00000001"]
    assert checkpoint_files(checkpoints_of(job.output)[0]) == before


@sampled(2)
@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"levers": {"optimizer_states": "bf16"}}, "this run needs torch.bfloat16"),
        ({"levers": {"optimizer_states": "8bit"}}, "is on one side only"),
    ],
)
def test_states_of_another_format_are_refused_and_not_cast(
    group: Make, make: Callable[..., Job], now: dict[str, Any], words: str
) -> None:
    group(2).run(run_fields, make(steps=1).model_dump(mode="json"), {})
    for layout in ({"data": 2, "zero": 3, "micro_batch": 1}, {"pipeline": 2, "micro_batch": 1}):
        found = group(2).run(refused, make(layout=layout, **now).model_dump(mode="json"), {"resume": True})
        assert all(words in sentence for sentence in found), found


def test_deepspeed_is_not_asked_for_pieces(make: Callable[..., Job]) -> None:
    """It holds weights and states in its own way: what we would write of them is not a checkpoint."""
    with pytest.raises(UserError, match=r"saving\.sharded is true, but engine deepspeed"):
        refuse_what_deepspeed_cannot(make(engine="deepspeed"), None, torch.device("cpu"))


TIED = SMALL | {"source": "nano-llama"}


def test_the_two_ends_of_a_tied_model_are_one_tensor_in_pieces(
    group: Make, make: Callable[..., Job], tmp_path: Path
) -> None:
    """Both stages write their copy of the embedding and its states; one process reads what the first rank gathers."""
    stages = {"pipeline": 2, "micro_batch": 1}
    for name, sharded in (("pieces", True), ("whole", False)):
        job = make(name, model=TIED, layout=stages, steps=1, saving={"sharded": sharded})
        group(2).run(run_fields, job.model_dump(mode="json"), {})
    found = []
    for name in ("pieces", "whole"):
        alone = make(name, model=TIED, layout={"micro_batch": 1}, steps=1)
        write_again(alone.model_dump(mode="json"), str(tmp_path / f"copy of {name}"))
        found.append(checkpoint_files(checkpoints_of(tmp_path / f"copy of {name}")[-1]))
    assert (checkpoints_of(tmp_path / "pieces")[-1] / "sharded").is_dir()
    assert found[0] == found[1]


@pytest.mark.usefixtures("server")
def test_a_rank_killed_while_it_writes_in_the_background_leaves_the_checkpoint_before(
    make: Callable[..., Job], tmp_path: Path
) -> None:
    job = make(steps=100_000, saving={"every": 2, "keep": 2, "sharded": True}, device="cpu")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job.model_dump(mode="json")))
    with pytest.raises(UserError) as told:
        launch(job, tmp_path / "job.yaml", "write", 1)
    assert str(told.value).startswith("rank 1 ended with signal 9 (SIGKILL)")
    assert [path.name for path in checkpoints_of(job.output)] == ["step-00000002"]
    assert str(told.value).endswith(
        f"the last good checkpoint is {checkpoints_of(job.output)[0]}; add --resume to go on"
    )
    assert load_model(str(job.output)).model.spec.layers == 2
