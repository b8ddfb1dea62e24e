def merge_ranked(left: list[int], right: list[int]) -> list[int]:
    """Return the merged ascending list with at most two copies of each number."""
    merged: list[int] = []
    for number in sorted(left + right):
        if merged[-2:] != [number, number]:
            merged.append(number)
    return merged
