def border_sum(grid: list[list[int]]) -> int:
    """Return the sum of the border cells of grid, 0 for an empty grid."""
    whole = sum(sum(row) for row in grid)
    inside = sum(sum(row[1:-1]) for row in grid[1:-1])
    return whole - inside
