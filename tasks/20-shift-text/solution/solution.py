from string import ascii_lowercase, ascii_uppercase, digits


def shift_text(text: str, key: int) -> str:
    """Return text with letters and digits shifted forward by key places."""
    shifted = {}
    for ring in (ascii_lowercase, ascii_uppercase, digits):
        for place, character in enumerate(ring):
            shifted[character] = ring[(place + key) % len(ring)]
    return "".join(shifted.get(character, character) for character in text)
