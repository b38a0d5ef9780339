"""Triton's interpreter beside a NumPy that is newer than it, and in a fifth of its time.

Triton 3.6, which torch 2.11 asks for, takes loop bounds from arrays of one element with `int(array)`. NumPy 2.4 refuses
that unless the array has no dimensions. Later Tritons ask for the element.

A launch replaces the functions of `triton.language` by interpreted ones, and restores them at its end; each call of one
jitted function by another replaces them again. Where kernels are interpreted, nothing wants the others back.

Whether an operation on integers overflows is computed for each of them, and thrown away unless kernels are debugged.

Every operation makes the type of its result anew, and of it the shape of a tensor. Equal ones are made once.
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
    """Have the first launch that needs it replace the language, for good."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton import language
    from triton.runtime import interpreter

    patch_language = interpreter._patch_lang
    replaced: set[str] = set()
    checked: set[int] = set()

    def patched(function: Any) -> Any:
        names = id(function.__globals__)  # those of a module, which stays
        if names not in checked:
            seen = [value for value in function.__globals__.values() if inspect.ismodule(value)]
            needed = {module.__name__ for module in seen if module in (language, language.core)}
            if not needed or not needed <= replaced:
                patch_language(function)
                replaced.update(needed)
            checked.add(names)
        return interpreter._LangPatchScope()  # with nothing to restore

    interpreter._patch_lang = patched


def ignore_overflows() -> None:
    """Overflows of integers, where no assertion looks at them."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    builder: Any = interpreter.interpreter_builder
    if hasattr(builder.options, "sanitize_overflow") and not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def share_types() -> None:
    """Equal types of blocks, and shapes of tensors, made once; NumPy's names of types, looked up once."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton.language import core, semantic
    from triton.runtime import interpreter

    make_type, make_tensor, name_type = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype

    def made_type(self: Any, element_ty: Any, shape: Any) -> None:
        if not isinstance(element_ty, core.dtype):
            return make_type(self, element_ty, shape)
        made = vars(element_ty).setdefault("_made_blocks", {})
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        if sizes not in made:
            make_type(self, element_ty, shape)
            made[sizes] = vars(self) | {"_of_tensors": {}}
        vars(self).update(made[sizes])
        return None

    def made_tensor(self: Any, handle: Any, type: Any) -> None:
        known = vars(type).setdefault("_of_tensors", {})
        if not known:
            make_tensor(self, handle, type)
            known.update({name: value for name, value in vars(self).items() if name not in ("handle", "type")})
        vars(self).update(known, handle=handle, type=type)

    def named_type(type: Any) -> Any:
        element = type.element_ty if isinstance(type, core.block_type) else type
        known = vars(element)
        if "_in_numpy" not in known:
            known["_in_numpy"] = name_type(element)
        return known["_in_numpy"]

    broadcast = semantic.TritonSemantic.broadcast_impl_value

    def broadcasted(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        if left.type.is_block() and right.type.is_block() and left.type.shape.values == right.type.shape.values:
            return left, right
        return broadcast(self, left, right)

    core.block_type.__init__, core.tensor.__init__ = made_type, made_tensor
    semantic.TritonSemantic.broadcast_impl_value = broadcasted
    interpreter._get_np_dtype = named_type
