def is_even(n: int) -> bool:
    """Return True if n is even and False if it is odd."""
    return n % 2 == 0
