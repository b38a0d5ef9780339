"""Our kernels inside Hugging Face models: one line, for one model instance.

    from tightfit.hf import AutoModelForCausalLM                  # instead of: from transformers import …
    model = tightfit.hf.accelerate(model)                         # or: a model that exists already
    tightfit.hf.undo(model)                                       # its own methods again

Nothing happens at import and no class of transformers is touched: replacements are bound to the modules of the one
model, so another model in the same process keeps its own code.
"""

from tightfit.hf.acceleration import accelerate, undo
from tightfit.hf.auto import AutoModelForCausalLM, AutoModelForImageTextToText

__all__ = ["AutoModelForCausalLM", "AutoModelForImageTextToText", "accelerate", "undo"]
