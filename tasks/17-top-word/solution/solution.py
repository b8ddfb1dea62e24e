def top_word(text: str) -> str:
    """Return the most frequent word of text in lower case, the earliest one of equals."""
    counts: dict[str, int] = {}
    for word in text.lower().split():
        word = word.strip(".,!?;:")
        if word:
            counts[word] = counts.get(word, 0) + 1
    return max(counts, key=counts.get, default="")
