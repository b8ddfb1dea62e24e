def add_minutes(clock: str, minutes: int) -> str:
    """Return the time minutes later than clock, as "HH:MM"."""
    hour, minute = clock.split(":")
    later = (int(hour) * 60 + int(minute) + minutes) % (24 * 60)
    return f"{later // 60:02}:{later % 60:02}"
