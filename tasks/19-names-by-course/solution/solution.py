def names_by_course(enrolled: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return a dictionary from course to the sorted list of its students."""
    names: dict[str, list[str]] = {}
    for name in sorted(enrolled):
        for course in set(enrolled[name]):
            names.setdefault(course, []).append(name)
    return names
