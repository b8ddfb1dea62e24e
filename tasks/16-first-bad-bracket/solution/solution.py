def first_bad_bracket(text: str) -> int:
    """Return the index of the wrong bracket, or -1 if all brackets match."""
    opener = {")": "(", "]": "[", "}": "{"}
    waiting: list[int] = []
    for index, character in enumerate(text):
        if character in opener.values():
            waiting.append(index)
        elif character in opener and (not waiting or text[waiting.pop()] != opener[character]):
            return index
    return waiting[0] if waiting else -1
