def shrink(n: int) -> tuple[int, int]:
    """Return the final digit and the number of rounds."""
    rounds = 0
    while n > 9:
        product = 1
        for digit in str(n):
            if digit != "0":
                product *= int(digit)
        n = product
        rounds += 1
    return n, rounds
