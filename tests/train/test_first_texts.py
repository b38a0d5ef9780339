"""How much of the data a trained tokenizer looks at."""

from pathlib import Path

import pytest

from tests.train.jobs import tiny_job
from tightfit.train.data.sources import find_sources
from tightfit.train.run_data import _first_texts


@pytest.mark.parametrize("letter", ["a", "é", "語"])
def test_the_first_texts_have_as_many_bytes_as_were_asked_for(letter: str, tmp_path: Path) -> None:
    """In UTF-8, in which one letter takes one to three bytes; the text that passes the limit is the last."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.txt").write_text(100 * letter, encoding="utf-8")
    settings = {"source": "train", "vocab_size": 320, "train_bytes": 250}
    job = tiny_job(tmp_path / "run", folder, tmp_path / "cache", tokenizer=settings)
    texts = list(_first_texts(job, find_sources(job.data.train)))
    sizes = [len(text.encode()) for text in texts]
    assert sum(sizes[:-1]) < 250 <= sum(sizes)


def test_half_a_surrogate_pair_is_a_character_too(tmp_path: Path) -> None:
    """JSON can escape one alone, which no UTF-8 can be."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "half \\ud83d a pair"}\n' * 4, encoding="utf-8")
    settings = {"source": "train", "vocab_size": 320, "train_bytes": 20}
    job = tiny_job(tmp_path / "run", rows, tmp_path / "cache", tokenizer=settings)
    assert list(_first_texts(job, find_sources(job.data.train))) == ["half \ud83d a pair"] * 2
