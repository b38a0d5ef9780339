"""Transformers' own checkpointing of layers, whose method has another name since 5.23."""

from typing import Any


def checkpoint_layers(model: Any) -> None:
    """Compute every layer of a model of transformers again in backward."""
    settings = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
