def mirror(text: str) -> str:
    """Return text followed by its reverse."""
    return text + text[::-1]
