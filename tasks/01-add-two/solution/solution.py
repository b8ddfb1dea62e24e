def add_two(a: float, b: float) -> float:
    """Return the sum of a and b."""
    return a + b
