"""The directory in which a compressed model grows, layer by layer, until it is renamed to what the user asked for.

It lies beside the target under a hidden name. Every layer is one safetensors file, written whole, with its errors in
the file's own metadata; so what exists is finished, and a run killed at any instant goes on with the next layer.
`work.json` says what work this is: another model, recipe or calibration is refused, not mixed in. One process at a time
works there, with the lock of the target held. Work that has finished nothing leaves no directory.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tightfit.durable import NO_ROOM, durable_file, flush, flush_tree, require_new, sweep
from tightfit.errors import UserError
from tightfit.models.files.checksums import write_checksums
from tightfit.models.files.tensor_file import save_tensors
from tightfit.models.huggingface.weights import INDEX_FILE
from tightfit.writer_lock import locked_beside

WORK_FILE = "work.json"


class WorkingDirectory:
    """Unfinished work for `target`, of `shards` files; the `with` statement locks it for this process."""

    def __init__(self, target: Path, work: dict[str, Any], shards: int) -> None:
        require_new(target)
        self.target, self.work, self.shards = target, work, shards
        self.path = target.parent / f".compressing-{target.name}"
        self._lock = ExitStack()

    def __enter__(self) -> Self:
        with self.writing(self.target.parent):
            self.target.parent.mkdir(parents=True, exist_ok=True)
        self._lock.enter_context(locked_beside(self.target))
        try:
            self._begin(self.work)
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self.path.is_dir() and not self._has_shards():
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    @contextmanager
    def writing(self, path: Path | None = None) -> Iterator[None]:
        """Turn errors of a full or unwritable disk into a UserError; finished shards stay."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            number, reason = getattr(error, "errno", None), getattr(error, "strerror", None) or error
            has_room = isinstance(error, OSError) and number not in NO_ROOM  # safetensors tells no number
            fix = "choose another place" if has_room else "make room and run the same again"
            raise UserError(f"cannot write {path or self.path}: {reason}; {fix}") from error

    def _begin(self, work: dict[str, Any]) -> None:
        file = self.path / WORK_FILE
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            sweep(self.path)
            self._refuse_foreign()
            if not file.exists() or not self._has_shards():
                with durable_file(file) as temporary:
                    temporary.write_text(json.dumps(work, indent=2) + "\n", encoding="utf-8")
            known = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"cannot write beside {self.target}: {error.strerror}; choose another place") from None
        except (json.JSONDecodeError, UnicodeDecodeError):
            known = None
        if known != work:
            differs = [name for name in work if not isinstance(known, dict) or known.get(name) != work[name]]
            raise UserError(
                f"{self.path} holds unfinished work for {self.target} that differs in its {' and '.join(differs)}; "
                "finish that, remove the directory, or write elsewhere"
            )

    def _refuse_foreign(self) -> None:
        """Refuse a directory with foreign files: they would get into the result, or be deleted with empty work."""
        if not (self.path / WORK_FILE).exists() and any(self.path.iterdir()):
            raise UserError(f"{self.path} is there and is no work of tightfit; remove it, or write elsewhere")

    def _has_shards(self) -> bool:
        """Whether any shard is finished, of this work or of another."""
        return any(self.path.glob("*.safetensors"))

    def shard(self, number: int) -> Path:
        """The file of shard `number`, counted from 0."""
        return self.path / f"model-{number + 1:05}-of-{self.shards:05}.safetensors"

    def is_done(self, number: int) -> bool:
        """Whether a shard is complete; one that was damaged since, by a failing disk or by hand, is written anew."""
        try:
            with safe_open(self.shard(number), framework="pt"):
                return True
        except (OSError, SafetensorError):
            return False

    def write(self, number: int, tensors: dict[str, Tensor], notes: dict[str, Any] | None = None) -> None:
        """Write a shard, with `notes` in its metadata."""
        metadata = {"format": "pt"} | ({"tightfit": json.dumps(notes)} if notes else {})
        with self.writing(self.shard(number)), durable_file(self.shard(number)) as temporary:
            save_tensors(tensors, temporary, metadata=metadata)

    def notes(self, number: int) -> dict[str, Any]:
        """The notes that were written with a shard."""
        with safe_open(self.shard(number), framework="pt") as file:
            found: dict[str, Any] = json.loads((file.metadata() or {}).get("tightfit", "{}"))
        return found

    def tensors(self, number: int) -> dict[str, Tensor]:
        """The tensors of a shard."""
        with safe_open(self.shard(number), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def finish(self, write_extras: Callable[[Path], None]) -> None:
        """Write the index and rename everything to the target, which exists whole from then on.

        `write_extras` writes further files before the rename, when a kill still leaves work that the next run resumes.
        """
        names: dict[str, str] = {}
        total = 0
        for number in range(self.shards):
            with safe_open(self.shard(number), framework="pt") as file:
                names |= dict.fromkeys(file.keys(), self.shard(number).name)
            total += self.shard(number).stat().st_size
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
        (self.path / INDEX_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        write_checksums(self.path)
        write_extras(self.path)
        flush_tree(self.path)
        if os.path.lexists(self.target):
            raise UserError(f"{self.target} has come to exist meanwhile; the result is in {self.path}, rename it")
        os.rename(self.path, self.target)  # with the work file, so that work killed before this can still be resumed
        (self.target / WORK_FILE).unlink()
        flush(self.target.parent)
