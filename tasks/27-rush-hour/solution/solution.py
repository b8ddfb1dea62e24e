from itertools import pairwise


def rush_hour(meetings: list[tuple[int, int]]) -> tuple[int, int, int] | None:
    """Return the largest number of meetings at once and its earliest stretch of time."""
    change: dict[int, int] = {}
    for start, end in meetings:
        if start < end:
            change[start] = change.get(start, 0) + 1
            change[end] = change.get(end, 0) - 1
    times = sorted(time for time in change if change[time] != 0)
    best = None
    running = 0
    for time, following in pairwise(times):
        running += change[time]
        if best is None or running > best[0]:
            best = (running, time, following)
    return best
