def course_plan(needs: dict[str, list[str]], limit: int) -> list[list[str]] | None:
    """Return the terms as lists of courses, or None if no plan exists."""
    waiting = set(needs).union(*needs.values())
    terms: list[list[str]] = []
    while waiting:
        ready = [course for course in sorted(waiting) if waiting.isdisjoint(needs.get(course, []))]
        if not ready:
            return None
        terms.append(ready[:limit])
        waiting -= set(ready[:limit])
    return terms
