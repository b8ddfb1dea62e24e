def initials(words: list[str]) -> str:
    """Return the upper-case first characters of words as one string."""
    return "".join(word[0].upper() for word in words if word)
