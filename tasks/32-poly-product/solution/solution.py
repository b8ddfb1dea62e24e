def poly_product(first: str, second: str) -> str:
    """Return the product of two polynomials in x as text."""
    product: dict[int, int] = {}
    for power, factor in terms(first):
        for other_power, other_factor in terms(second):
            total = power + other_power
            product[total] = product.get(total, 0) + factor * other_factor
    text = ""
    for power in sorted(product, reverse=True):
        factor = product[power]
        if factor == 0:
            continue
        if text:
            text += " - " if factor < 0 else " + "
        elif factor < 0:
            text = "-"
        if power == 0 or abs(factor) != 1:
            text += str(abs(factor))
        if power > 0:
            text += "x" if power == 1 else f"x^{power}"
    return text or "0"


def terms(text: str) -> list[tuple[int, int]]:
    """Return the (power, factor) pairs of a polynomial."""
    pairs = []
    for term in text.replace(" - ", " + -").split(" + "):
        number, x, power = term.partition("x")
        if number in ("", "-"):
            number += "1"
        if not x:
            pairs.append((0, int(number)))
        else:
            pairs.append((int(power[1:]) if power else 1, int(number)))
    return pairs
