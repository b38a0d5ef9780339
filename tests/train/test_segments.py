"""Which processes have torch's allocator grow its segments, and who may choose otherwise."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from tightfit.jobs.layout import Layout
from tightfit.levers.policy.segments import SETTING, VARIABLES
from tightfit.train.segments import use_expandable_segments

LONG, CARD = Layout(context=8), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def told(layout: Layout, device: torch.device) -> list[Any]:
    """What the allocator is told."""
    settings = list[Any]()
    with patch.object(torch._C, "_accelerator_setAllocatorSettings", settings.append):
        use_expandable_segments(layout, device)
    return settings


def test_ranks_with_pieces_of_rows_have_segments_that_grow() -> None:
    assert told(LONG, CARD) == [SETTING]
    assert told(Layout(data=8, zero=3), CARD) == told(LONG, torch.device("cpu")) == []


@pytest.mark.parametrize("name", VARIABLES)
def test_the_environment_goes_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512")
    assert told(LONG, CARD) == []


def test_torch_knows_the_setting() -> None:
    """Parsed for real, and set back."""
    torch._C._accelerator_setAllocatorSettings(SETTING)
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
