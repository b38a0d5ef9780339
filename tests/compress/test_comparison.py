"""Comparing two models: every number against the definition, computed from whole logits in float64."""

import io
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.compress.conftest import SPEC, random_model
from tests.compress.test_odd_sources import changed_weight
from tightfit.compress import comparison
from tightfit.compress.comparison import compare_models, compare_sources
from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.saving import write_model
from tightfit.models.text.tokenizer import train_tokenizer
from tightfit.train.progress import followed


def models() -> tuple[Decoder, Decoder]:
    original, changed = random_model(SPEC), random_model(SPEC)
    with torch.no_grad():
        for parameter in changed.layers.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return changed, original


def test_against_the_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    changed, original = models()
    tokens = torch.randint(0, 250, (6, 33), generator=torch.Generator().manual_seed(3))
    labels = tokens[:, 1:].clone()
    labels[2, :10] = -100
    batch = {"tokens": tokens[:, :-1], "labels": labels, "documents": torch.zeros(6, 32, dtype=torch.int32)}
    monkeypatch.setattr(comparison, "CHUNK_LOGITS", 7 * SPEC.vocab_size)  # several chunks of tokens
    halves = [{name: tensor[i : i + 3] for name, tensor in batch.items()} for i in (0, 3)]
    found = compare_models(changed, original, halves)
    with torch.no_grad():
        q, p = (model(batch["tokens"]).logits.double().log_softmax(-1) for model in (changed, original))
    counted = labels != -100
    losses = -q.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    divergence = (p.exp() * (p - q)).sum(-1)
    assert found.tokens == int(counted.sum())
    assert found.loss.mean == pytest.approx(float(losses[counted].mean()), rel=1e-5)
    assert found.kl.mean == pytest.approx(float(divergence[counted].mean()), rel=1e-3)
    same = (q.argmax(-1) == p.argmax(-1))[counted].double().mean()
    assert found.agreement.mean == pytest.approx(float(same))
    assert found.perplexity == pytest.approx(math.exp(found.loss.mean))
    equal = [losses[i].mean() for i in (0, 1, 3, 4, 5)]  # rows that count the same
    spread = 1.96 * float(torch.stack(equal).std()) / 6**0.5
    assert found.loss.half_width == pytest.approx(spread, rel=0.6)


def test_a_model_against_itself() -> None:
    _, original = models()
    tokens = torch.randint(0, 250, (1, 16))
    batch = {"tokens": tokens, "labels": tokens, "documents": torch.zeros(1, 16, dtype=torch.int32)}
    found = compare_models(original, original, [batch])
    assert (found.kl.mean, found.agreement.mean, found.loss_difference.mean) == (0.0, 1.0, 0.0)
    assert found.loss.half_width is None  # one row has no interval


def test_rows_longer_than_the_model(tiny: Path, text: Path, token_cache: Path) -> None:
    with pytest.raises(UserError, match="129 is more than the 128 positions"):
        compare_sources(
            str(tiny), str(tiny), [str(text)], sequence_length=129, cache=token_cache, device=torch.device("cpu")
        )


def test_models_that_read_other_tokens_are_not_compared(
    tiny: Path, text: Path, token_cache: Path, tmp_path: Path
) -> None:
    """Of one size or not: the same numbers would mean other texts to each."""
    write_model(tmp_path, random_model(SPEC), train_tokenizer(["zebra quagga okapi gnu kudu eland oryx " * 20], 265))
    with pytest.raises(UserError, match=r"token \d+ of .* are different texts"):
        compare_sources(str(tmp_path), str(tiny), [str(text)], cache=token_cache, device=torch.device("cpu"))


@pytest.mark.parametrize("broken_is_first", [True, False])
def test_a_loss_that_is_no_number_is_a_sentence(
    broken_is_first: bool, tiny: Path, text: Path, token_cache: Path, tmp_path: Path
) -> None:
    """A table of nan with exit code 0 was all there was."""
    broken = changed_weight(tiny, tmp_path / "broken", float("nan"))
    models = [str(broken), str(tiny)] if broken_is_first else [str(tiny), str(broken)]
    with pytest.raises(UserError, match=r"the loss of .*broken is nan: its weights are damaged"):
        compare_sources(models[0], models[1], [str(text)], cache=token_cache, device=torch.device("cpu"))


def test_text_is_looked_at_before_models_are_loaded(
    tiny: Path, token_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of large ones that takes minutes, after which a name was found to be misspelt."""
    monkeypatch.setattr(comparison, "load_model", None)
    with pytest.raises(UserError, match=r"wiki.txt does not exist"):
        compare_sources(
            str(tiny), str(tiny), [str(tmp_path / "wiki.txt")], cache=token_cache, device=torch.device("cpu")
        )


@pytest.mark.parametrize("on_terminal", [True, False])
def test_progress_is_shown_on_a_terminal(on_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    console = partial(Console, file=stream, force_terminal=on_terminal)
    monkeypatch.setattr("tightfit.train.progress.Console", lambda stderr: console())
    assert list(followed(iter("abc"), 3, what="evaluating", shown=True)) == ["a", "b", "c"]
    assert ("3/3" in stream.getvalue()) == on_terminal
