"""A task and its packed form: a gzip tar of the task directory's contents, as published task sets hold it.

Archives come from strangers. They are unpacked in memory, within limits, and refused whole when they hold anything
but regular files and directories inside the task. Leaves out: file modes (unpacking makes `*.sh` executable).
"""

import gzip
import io
import os
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

MAX_MEMBERS = 1_000  # files and directories of one task
MAX_FILE = 16 * 2**20  # bytes
MAX_TASK = 64 * 2**20  # bytes, all files of a task
MAX_ARCHIVE = MAX_TASK + MAX_MEMBERS * 2_048  # bytes of the unpacked tar: files, headers and padding
MAX_EXTENSION = 4_096  # bytes of a tar extension header, which only has to hold a long name

# What reading a hostile archive may raise: RecursionError comes of chained tar extension headers.
BROKEN = (tarfile.TarError, zlib.error, ValueError, OverflowError, RecursionError, EOFError, OSError)

Entry = tuple[str, int, Callable[[], bytes] | None]  # path, size, how to read it (None: a directory)


@dataclass(frozen=True)
class Task:
    id: str  # the task directory's name
    instruction: str  # text of instruction.md
    files: dict[str, bytes]  # every other file by POSIX path relative to the task directory


def collect(entries: Iterable[Entry]) -> dict[str, bytes]:
    """Contents by normalised path. Raises ValueError for a path out of the task and anything over a limit."""
    files: dict[str, bytes] = {}
    total = 0
    for count, (name, size, read) in enumerate(entries, start=1):
        parts = [part for part in name.split("/") if part not in ("", ".")]
        path = "/".join(parts)
        if name.startswith("/") or ".." in parts or (read is not None and not parts):
            raise ValueError(f"{name!r} is no path inside the task")
        if not name.isprintable():
            raise ValueError(f"{name!r} has unprintable characters")
        if count > MAX_MEMBERS:
            raise ValueError(f"more than {MAX_MEMBERS} files and directories")
        if read is None:
            continue
        total += size
        if size > MAX_FILE:
            raise ValueError(f"{name!r} is larger than {MAX_FILE} bytes")
        if total > MAX_TASK:
            raise ValueError(f"all files together are larger than {MAX_TASK} bytes")
        if path in files:
            raise ValueError(f"{name!r} occurs twice")
        files[path] = read()
    for folder in {os.path.dirname(path) for path in files}:
        while folder:
            if folder in files:
                raise ValueError(f"{folder!r} is both a file and a directory")
            folder = os.path.dirname(folder)
    return files


class _Header(tarfile.TarInfo):
    """A tar header that is refused, before any of its data is read, unless it is a plain file or directory.

    tarfile takes a damaged header after the first for the end of the archive; here it is an error, and so is
    an archive without its end mark. Extension headers are kept short: tarfile can be very slow on long ones.
    """

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> tarfile.TarInfo:
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"broken tar header ({error})") from None
        if header.size < 0:
            raise tarfile.ReadError(f"{header.name!r} has a negative size")
        if header.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME):
            if header.size > MAX_EXTENSION:
                raise tarfile.ReadError(f"an extension header is larger than {MAX_EXTENSION} bytes")
        elif header.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
            kind = {
                tarfile.LNKTYPE: "hard link",
                tarfile.SYMTYPE: "symbolic link",
                tarfile.CHRTYPE: "character device",
                tarfile.BLKTYPE: "block device",
                tarfile.FIFOTYPE: "fifo",
            }.get(header.type, f"tar member of type {header.type!r}")
            raise tarfile.ReadError(f"{header.name!r} is a {kind}, only files and directories are taken")
        return header


def archive_entries(data: bytes) -> Iterator[Entry]:
    if data.startswith(b"\x1f\x8b"):
        # One byte more than allowed shows a bomb without expanding it.
        data = gzip.GzipFile(fileobj=io.BytesIO(data)).read(MAX_ARCHIVE + 1)
    if len(data) > MAX_ARCHIVE:
        raise ValueError(f"unpacks to more than {MAX_ARCHIVE} bytes")
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:", tarinfo=_Header) as archive:
        for member in archive:
            if member.issparse() or member.size < 0:
                raise ValueError(f"{member.name!r} has holes or a negative size")
            yield member.name, member.size, None if member.isdir() else archive.extractfile(member).read


def archive(task: Task) -> bytes:
    """gzip tar of the task directory's contents; no times, owners or modes of this machine go in."""
    buffer = io.BytesIO()
    files = {"instruction.md": task.instruction.encode(), **task.files}
    folders = {str(parent) for path in files for parent in PurePosixPath(path).parents} - {"."}
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(folders | files.keys()):
            header = tarfile.TarInfo(path)
            if path in folders:
                header.type, header.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(header)
            else:
                header.size, header.mode = len(files[path]), file_mode(path)
                archive.addfile(header, io.BytesIO(files[path]))
    return gzip.compress(buffer.getvalue(), compresslevel=6, mtime=0)


def file_mode(path: str) -> int:
    return 0o755 if path.endswith(".sh") else 0o644
