def fill_shelves(widths: list[int], capacity: int) -> list[list[int]]:
    """Return the shelves as lists of book widths, filled in the given order."""
    shelves: list[list[int]] = []
    for width in widths:
        if shelves and sum(shelves[-1]) + width <= capacity:
            shelves[-1].append(width)
        else:
            shelves.append([width])
    return shelves
