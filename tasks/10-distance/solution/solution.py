def distance(a: float, b: float) -> float:
    """Return how far apart a and b are."""
    return abs(a - b)
