def count_vowels(text: str) -> int:
    """Return how many characters of text are vowels."""
    return sum(letter in "aeiou" for letter in text.lower())
