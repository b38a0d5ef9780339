"""Triton's interpreter beside a NumPy that is newer than it, and in a good third of its time.

Triton 3.6, which torch 2.11 asks for, takes loop bounds from arrays of one element with `int(array)`. NumPy 2.4 refuses
that unless the array has no dimensions. Later Tritons ask for the element.

A launch replaces the functions of `triton.language` by interpreted ones, and restores them at its end. Each call of one
jitted function by another does so again, to no effect: a third of the time of our kernels.

Whether an operation on integers overflows is computed for each of them, and thrown away unless kernels are debugged:
two fifths of what is left.
"""

import importlib.util
import inspect
from dataclasses import replace
from typing import Any

import numpy as np


def _refuses() -> bool:
    try:
        return int(np.ones(1, dtype=np.int64)) != 1
    except TypeError:
        return True


def _with_index(patch_tensor: Any) -> Any:
    """What makes tensors of the interpreter, with an `__index__` that asks for the element."""

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patched


def read_single_elements() -> None:
    """Where it is needed, and where Triton still is what it was."""
    if importlib.util.find_spec("triton") is None or not _refuses():
        return
    import triton
    from triton.runtime import interpreter

    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7):
        interpreter._patch_lang_tensor = _with_index(interpreter._patch_lang_tensor)


def patch_language_once() -> None:
    """Have a launch replace the language once, and not at every call inside it."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton import language
    from triton.runtime import interpreter

    patch_language, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: set[str] = set()

    def patched(function: Any) -> Any:
        seen = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        needed = {module.__name__ for module in seen if module in (language, language.core)}
        if needed and needed <= replaced:
            return None
        replaced.update(needed)
        return patch_language(function)

    def launched(executor: Any, *arguments: Any, **named: Any) -> Any:
        replaced.clear()
        try:
            return launch(executor, *arguments, **named)
        finally:
            replaced.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patched, launched


def ignore_overflows() -> None:
    """Overflows of integers, where no assertion looks at them."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    builder: Any = interpreter.interpreter_builder
    if hasattr(builder.options, "sanitize_overflow") and not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
