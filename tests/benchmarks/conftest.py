"""Pictures of benchmarks are looked at for what is in them, as those of commands are."""

from tests.few_dots import few_dots

__all__ = ["few_dots"]
