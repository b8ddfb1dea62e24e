VOWELS = "aeiou"


def typo_cost(typed: str, meant: str) -> int:
    """Return the smallest cost of turning typed into meant."""
    drop = prices(typed)
    add = prices(meant)
    costs = [sum(add[:end]) for end in range(len(meant) + 1)]
    for i, old in enumerate(typed):
        above, costs = costs, [costs[0] + drop[i]]
        for j, new in enumerate(meant):
            if old == new:
                replace = 0
            elif old in VOWELS and new in VOWELS:
                replace = 1
            else:
                replace = 3
            costs.append(min(above[j] + replace, above[j + 1] + drop[i], costs[j] + add[j]))
    return costs[-1]


def prices(word: str) -> list[int]:
    """Return the cost of dropping or adding each letter of word."""
    return [1 if index > 0 and word[index - 1] == letter else 2 for index, letter in enumerate(word)]
