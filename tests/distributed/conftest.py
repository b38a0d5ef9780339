"""Groups of two and four processes, shared by all tests of this folder, and the server that all are forked from."""

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.group import PRELOADED, Group
from tightfit.parallel.forked import start_server


@pytest.fixture(scope="session")
def server() -> None:
    """For tests of what forks by itself, from the server that has imported what tests need."""
    start_server(PRELOADED)


@pytest.fixture(scope="package")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Group]]:
    """The group of so many processes, started when first asked for."""
    made: dict[int, Group] = {}

    def of(world: int) -> Group:
        if world not in made:
            made[world] = Group(world, tmp_path_factory.mktemp("meeting") / f"of-{world}")
        return made[world]

    yield of
    for running in made.values():
        running.__exit__(None, None, None)
