def folder_sizes(listing: str) -> dict[str, int]:
    """Return the total size of every folder of an indented listing."""
    sizes: dict[str, int] = {}
    folders: list[str] = []
    for line in listing.split("\n"):
        if not line.strip():
            continue
        entry = line.strip().split(" ")
        indent = len(line) - len(line.lstrip(" "))
        level = indent // 2
        if indent % 2 or level > len(folders):
            raise ValueError(f"wrong indentation: {line!r}")
        del folders[level:]
        if len(entry) == 1:
            folders.append(entry[0])
            sizes["/".join(folders)] = 0
        else:
            for depth in range(len(folders)):
                sizes["/".join(folders[: depth + 1])] += int(entry[1])
    return sizes
