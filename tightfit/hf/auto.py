"""transformers' auto classes, returning accelerated models."""

from typing import Any

import transformers
from transformers import PreTrainedModel

from tightfit.hf.acceleration import accelerate


class AutoModelForCausalLM:
    """`transformers.AutoModelForCausalLM`, but its models are accelerated; every argument is passed on."""

    _auto: Any = transformers.AutoModelForCausalLM

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """A model with trained weights (and the report on loading them, where `output_loading_info` asks for it)."""
        loaded = cls._auto.from_pretrained(*args, **kwargs)
        accelerate(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> PreTrainedModel:
        """A model with random weights."""
        return accelerate(cls._auto.from_config(*args, **kwargs))


class AutoModelForImageTextToText(AutoModelForCausalLM):
    """The same for `transformers.AutoModelForImageTextToText`: PaliGemma and Gemma 3."""

    _auto: Any = transformers.AutoModelForImageTextToText
