"""Remove the code for all GPUs but one kind from a shared library or a wheel, so that it compresses to a fraction:

    python tools/one_gpu_only.py libtransformer_engine.so trimmed.so [--arch 90]
    python tools/one_gpu_only.py torch-2.14.1-cp312-cp312-manylinux_2_28_x86_64.whl bundle/ [--without 'torch/test/*']

For a machine without network to which little can be copied (scripts/bundle.sh). Files keep their length and addresses;
the machine code and the PTX that a GPU of this kind never needs become zeros. Of Transformer Engine 2.20.2 (343 MB)
`xz` then leaves 24 MB. A wheel keeps its name, and is written without compression, for `xz`.

nvcc writes fat binaries in this format: a header (magic, version, length of the header, length of the rest) and entries
(kind: 1 PTX, 2 machine code; length of the entry's header; length of its code; architecture). The driver takes the
machine code for its own kind, and compiles PTX of this kind or an older one where there is none.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import struct
import sys
import zipfile
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

MAGIC = struct.pack("<I", 0xBA55ED50)
HEADER = struct.Struct("<IHHQ")
ENTRY = struct.Struct("<HHIQ")
ARCHITECTURE, SHORTEST, LONGEST, PTX, MACHINE_CODE = 28, 64, 4096, 1, 2


class NoMachineCode(ValueError):
    """A library holds no machine code for a kind of GPU."""


def clear_others(library: bytearray, arch: int) -> tuple[int, int]:
    """Zero all code but the machine code for `arch`, and PTX for it or older ones in a fat binary without that; returns
    the numbers of bytes of machine code kept, and of all code cleared.

    Raises:
        NoMachineCode: there is none for `arch`.
        ValueError: an apparent fat binary is invalid.
    """
    kept, cleared = 0, Counter[int]()
    at = library.find(MAGIC)
    while at >= 0:
        _, version, header, size = HEADER.unpack_from(library, at)
        end = at + header + size
        if version != 1 or header != HEADER.size or end > len(library):
            at = library.find(MAGIC, at + 1)  # four bytes that happen to be the same
            continue
        entries = list[tuple[int, int, int, int]]()  # kind, architecture, begin and length of the code
        entry = at + header
        while entry < end:
            kind, _, own, code = ENTRY.unpack_from(library, entry)
            if not (SHORTEST <= own <= LONGEST and entry + own + code <= end):
                raise ValueError(f"at byte {entry:,}: invalid entry of a fat binary, of {own:,} and {code:,} bytes")
            (its,) = struct.unpack_from("<I", library, entry + ARCHITECTURE)
            entries.append((kind, its, entry + own, code))
            entry += own + code
        compiled = any(kind == MACHINE_CODE and its == arch for kind, its, _, _ in entries)
        for kind, its, begin, code in entries:
            if kind == MACHINE_CODE and its == arch:
                kept += code
            elif compiled or kind != PTX or its > arch:
                cleared[its] += code
                library[begin : begin + code] = bytes(code)
        at = library.find(MAGIC, end)
    if not kept:
        raise NoMachineCode(f"no machine code for architecture {arch}; found: {sorted(cleared) or 'none'}")
    return kept, cleared.total()


def trim_wheel(wheel: Path, output: Path, arch: int, without: Sequence[str]) -> tuple[int, int]:
    """Write a wheel whose libraries have been trimmed, without files that match a pattern; `RECORD` lists the new sums.
    Returns the numbers of bytes of machine code kept, and of all code cleared.

    A library without machine code for `arch` stays as it is: it may be for the CPU, or hold PTX alone.

    Raises:
        ValueError: a library has an invalid fat binary.
    """
    kept = cleared = 0
    with zipfile.ZipFile(wheel) as read, zipfile.ZipFile(output, "w", zipfile.ZIP_STORED) as write:
        record = next(name for name in read.namelist() if name.endswith(".dist-info/RECORD"))
        rows = {row[0]: row for row in csv.reader(io.TextIOWrapper(read.open(record), "utf-8", newline=""))}
        for item in read.infolist():
            if item.filename == record:
                continue
            if any(fnmatch(item.filename, pattern) for pattern in without):
                rows.pop(item.filename, None)
                continue
            content = read.read(item)
            if MAGIC in content:
                trimmed = bytearray(content)
                try:
                    of_this, of_others = clear_others(trimmed, arch)
                except NoMachineCode:
                    pass
                except ValueError as error:
                    raise ValueError(f"{item.filename}: {error}") from error
                else:
                    content, kept, cleared = bytes(trimmed), kept + of_this, cleared + of_others
                    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
                    rows[item.filename] = [item.filename, f"sha256={digest}", str(len(content))]
            item.compress_type = zipfile.ZIP_STORED
            write.writestr(item, content)
        listed = io.StringIO()
        csv.writer(listed, lineterminator="\n").writerows(rows.values())
        write.writestr(record, listed.getvalue())
    return kept, cleared


def main() -> int:
    """Read, clear, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a shared library, or a wheel (.whl)")
    parser.add_argument("output", type=Path, help="a different file; of a wheel: a directory")
    parser.add_argument(
        "--arch", type=int, default=90, help="compute capability without its point (default: 90, Hopper)"
    )
    parser.add_argument(
        "--without", action="append", default=[], metavar="PATTERN",
        help="of a wheel: leave out files whose path matches; may be given several times",
    )  # fmt: skip
    given = parser.parse_args()
    try:
        if given.source.suffix == ".whl":
            given.output.mkdir(parents=True, exist_ok=True)
            kept, cleared = trim_wheel(given.source, given.output / given.source.name, given.arch, given.without)
        else:
            library = bytearray(given.source.read_bytes())
            kept, cleared = clear_others(library, given.arch)
            given.output.write_bytes(library)
    except ValueError as error:
        print(f"{given.source}: {error}", file=sys.stderr)
        return 2
    print(f"{kept / 1e6:,.0f} MB of code for {given.arch} kept, {cleared / 1e6:,.0f} MB for others cleared")
    return 0


if __name__ == "__main__":
    sys.exit(main())
