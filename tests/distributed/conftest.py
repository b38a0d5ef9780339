"""Groups of two and four processes, shared by all tests of this folder."""

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.group import Group


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
