"""Counts with their nouns, as sentences have them: `1 row`, `4,096 tokens`."""


def counted(count: int, noun: str) -> str:
    """`1 row`, `4,096 rows`; for nouns whose plural ends in s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def counted_tokens(count: int) -> str:
    """`4,096 tokens`, from a million on `61.4 M tokens`."""
    return counted(count, "token") if count < 1_000_000 else f"{count / 1e6:.3g} M tokens"
