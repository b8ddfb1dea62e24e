def last_item(items: list, default: object) -> object:
    """Return the last item of items, or default if items is empty."""
    return items[-1] if items else default
