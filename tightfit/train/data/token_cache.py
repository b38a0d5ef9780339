"""The cache of token stores: each is made once, appears whole or not at all, and is made again when damaged.

One directory per recipe holds the store and a lock. Processes that want the same store wait for the one that makes it
(the kernel drops the lock of a killed process); where a file system has no locks, every process makes the store and the
first rename wins, which costs time but is correct. A good store is opened without writing, so a cache may be read-only.
"""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tightfit.bounded_files import user_path
from tightfit.durable import discard_directory, durable_directory, sweep
from tightfit.errors import UserError
from tightfit.train.data.shard_writer import ShardWriter
from tightfit.train.data.token_store import DamagedStoreError, Recipe, TokenStore, open_store


def cached_store(cache_dir: Path, recipe: Recipe, fill: Callable[[ShardWriter], None]) -> TokenStore:
    """The store of `recipe` under `cache_dir`; `fill` writes it where there is no good one yet."""
    home = user_path(cache_dir, "the token cache") / recipe.key
    target = home / "store"
    with suppress(DamagedStoreError, FileNotFoundError):
        return open_store(target)
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _locked(home / "lock") as alone:
            if alone:
                sweep(home)
            with _nothing_left(home):
                return _existing(target) or _made(target, recipe, fill)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"the token cache {cache_dir} cannot be written ({reason}); free space there or choose another directory"
        ) from error


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Holds the lock of `path`; False where the file system has no locks."""
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True


@contextmanager
def _nothing_left(home: Path) -> Iterator[None]:
    """Remove the store's directory if making the store fails; a process that waits for the lock makes it anew."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            (home / "lock").unlink()
            home.rmdir()
        raise


def _existing(target: Path) -> TokenStore | None:
    """The store at `target` if it is whole; a damaged one is removed."""
    try:
        return open_store(target)
    except FileNotFoundError:
        return None
    except DamagedStoreError:
        discard_directory(target)
        return None


def _made(target: Path, recipe: Recipe, fill: Callable[[ShardWriter], None]) -> TokenStore:
    try:
        with durable_directory(target) as folder:
            writer = ShardWriter(folder, recipe)
            try:
                fill(writer)
                writer.finish()
            finally:
                writer.close()
    except OSError:
        with suppress(DamagedStoreError, FileNotFoundError):
            return open_store(target)  # another process has made it first
        raise
    return open_store(target)
