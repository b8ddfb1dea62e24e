from heapq import heappop, heappush


def cheapest_route(grid: list[str]) -> int:
    """Return the smallest cost of going from S to E through at most one wall, or -1."""
    cells = {(r, c): cell for r, row in enumerate(grid) for c, cell in enumerate(row)}
    start = next(place for place, cell in cells.items() if cell == "S")
    queue = [(0, start, 0)]
    done = set()
    while queue:
        cost, place, broken = heappop(queue)
        if cells[place] == "E":
            return cost
        if (place, broken) in done:
            continue
        done.add((place, broken))
        r, c = place
        for neighbour in ((r - 1, c), (r + 1, c), (r, c - 1), (r, c + 1)):
            cell = cells.get(neighbour)
            if cell == "#" and not broken:
                heappush(queue, (cost + 10, neighbour, 1))
            elif cell in ("S", "E"):
                heappush(queue, (cost, neighbour, broken))
            elif cell is not None and cell != "#":
                heappush(queue, (cost + int(cell), neighbour, broken))
    return -1
