from math import inf


def fewest_stamps(postage: int, stock: dict[int, int]) -> int:
    """Return the smallest number of stamps worth exactly postage, or -1."""
    fewest = [0] + [inf] * postage
    for value, left in stock.items():
        for _ in range(min(left, postage // value)):
            for total in range(postage, value - 1, -1):
                fewest[total] = min(fewest[total], fewest[total - value] + 1)
    return -1 if fewest[postage] == inf else fewest[postage]
