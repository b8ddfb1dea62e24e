def longest_climb(values: list[int]) -> list[int]:
    """Return the longest strictly rising stretch of values, the first one of equals."""
    best: list[int] = []
    climb: list[int] = []
    for value in values:
        climb = climb + [value] if climb and value > climb[-1] else [value]
        if len(climb) > len(best):
            best = climb
    return best
