def double_all(numbers: list[int]) -> list[int]:
    """Return a list in which every number is twice as large."""
    return [2 * number for number in numbers]
