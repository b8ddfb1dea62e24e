def spread(numbers: list[int]) -> int:
    """Return the largest number minus the smallest one, 0 for an empty list."""
    return max(numbers) - min(numbers) if numbers else 0
