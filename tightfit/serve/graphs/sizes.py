"""For how many sequences steps are captured; a step is padded to the next of these sizes."""


def decode_sizes(most: int) -> list[int]:
    """Numbers of sequences that graphs are captured for: small powers of two, then eights, then sixteens."""
    sizes = [size for size in (1, 2, 4, 8, 16, *range(24, 65, 8), *range(80, most + 16, 16)) if size < most]
    return [*sizes, most]
