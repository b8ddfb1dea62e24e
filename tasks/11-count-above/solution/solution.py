def count_above(numbers: list[int], limit: int) -> int:
    """Return how many of numbers are greater than limit."""
    return sum(number > limit for number in numbers)
