from itertools import groupby


def pack_runs(text: str) -> str:
    """Return text with every run packed into its character and its length."""
    packed = ""
    for character, run in groupby(text):
        length = len(list(run))
        packed += character if length == 1 else f"{character}{length}"
    return packed
