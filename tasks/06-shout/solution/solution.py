def shout(text: str) -> str:
    """Return text in upper case with one "!" added."""
    return text.upper() + "!"
