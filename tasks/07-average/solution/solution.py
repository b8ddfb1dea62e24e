def average(numbers: list[float]) -> float:
    """Return the average of numbers, 0.0 for an empty list."""
    return sum(numbers) / len(numbers) if numbers else 0.0
