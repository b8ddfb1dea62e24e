import pytest
from solution import folder_sizes


def test_nothing():
    assert folder_sizes("") == {}
    assert folder_sizes("\n  \n") == {}
    assert folder_sizes("readme 12\nlicence 40") == {}


def test_one_folder():
    assert folder_sizes("src") == {"src": 0}
    assert folder_sizes("src\n  a.py 7\n  b.py 30\n") == {"src": 37}


def test_nested_sizes_reach_every_level():
    listing = "a\n  b\n    c\n      deep 4\n    mid 20\n  top 300\nlast 1000"
    assert folder_sizes(listing) == {"a": 324, "a/b": 24, "a/b/c": 4}


def test_several_levels_back_at_once():
    listing = "x\n  y\n    z\n      f 1\nw\n  g 2\n"
    assert folder_sizes(listing) == {"x": 1, "x/y": 1, "x/y/z": 1, "w": 2}


def test_same_name_in_different_places():
    listing = "lib\n  lib\n    one 1\n  two 2\nbin\n  lib\n    three 3"
    assert folder_sizes(listing) == {"lib": 3, "lib/lib": 1, "bin": 3, "bin/lib": 3}


def test_blank_lines_are_ignored():
    assert folder_sizes("\npics\n\n  cat.png 8\n   \n  dog.png 9\n") == {"pics": 17}


def test_wrong_indentation():
    for listing in ["a\n b 1", "a\n   b 1", "  a", "  a 1", "a\n    b 1", "a 1\n  b 2", "d\n  a 1\n    b 2"]:
        with pytest.raises(ValueError):
            folder_sizes(listing)


def test_deep():
    listing = "\n".join("  " * level + f"d{level}" for level in range(40)) + "\n" + "  " * 40 + "file 6"
    sizes = folder_sizes(listing)
    assert len(sizes) == 40
    assert set(sizes.values()) == {6}
    assert "/".join(f"d{level}" for level in range(40)) in sizes
