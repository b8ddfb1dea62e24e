SIGNS = {
    "M": 1000, "CM": 900, "D": 500, "CD": 400, "C": 100, "XC": 90, "L": 50, "XL": 40, "X": 10, "IX": 9,
    "V": 5, "IV": 4, "I": 1,
}


def value(numeral: str) -> int:
    """Return the number a Roman numeral stands for."""
    total = 0
    for sign, following in zip(numeral, numeral[1:] + " "):
        worth = SIGNS[sign]
        total += -worth if SIGNS.get(following, 0) > worth else worth
    return total


def roman_add(first: str, second: str) -> str:
    """Return the Roman numeral of first + second."""
    rest = value(first) + value(second)
    numeral = ""
    for sign, worth in SIGNS.items():
        numeral += sign * (rest // worth)
        rest %= worth
    return numeral
