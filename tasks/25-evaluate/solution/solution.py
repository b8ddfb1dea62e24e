import re

LEVELS = [("|",), ("+", "-"), ("*",)]


def evaluate(expression: str) -> int:
    """Return the value of expression; raise ValueError if it is malformed."""
    tokens = [*re.findall(r"[0-9]+|\S", expression), "end"]
    tokens.reverse()
    value = read_level(tokens, 0)
    if tokens != ["end"]:
        raise ValueError(f"unexpected {tokens[-1]!r}")
    return value


def read_level(tokens: list[str], level: int) -> int:
    """Take an expression of operators no looser than level off the end of tokens."""
    if level == len(LEVELS):
        return read_operand(tokens)
    value = read_level(tokens, level + 1)
    while tokens[-1] in LEVELS[level]:
        operator = tokens.pop()
        right = read_level(tokens, level + 1)
        if operator == "|":
            value = max(value, right)
        elif operator == "+":
            value += right
        elif operator == "-":
            value -= right
        else:
            value *= right
    return value


def read_operand(tokens: list[str]) -> int:
    """Take one operand off the end of tokens."""
    token = tokens.pop()
    if token == "-":
        return -read_operand(tokens)
    if token == "(":
        value = read_level(tokens, 0)
        if tokens.pop() != ")":
            raise ValueError("missing )")
        return value
    if token[0] not in "0123456789":
        raise ValueError(f"unexpected {token!r}")
    return int(token)
