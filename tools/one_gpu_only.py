"""Clear a shared library of the code for all GPUs but one kind, so that it is compressed to a fraction:

    python tools/one_gpu_only.py libtransformer_engine.so trimmed.so [--arch 90]

For a machine that nothing can be fetched from and little can be carried to. The file stays as long as it is and keeps
its addresses; the machine code and the PTX for other kinds become zeros, which the driver never reads where it finds
code for its own. Of Transformer Engine 2.20.2 (343 MB) `xz` then leaves 24 MB.

The format is that of fat binaries as nvcc writes them: a header (magic, version, length of the header, length of all
that follows) and entries (kind: 1 PTX, 2 machine code; length of the entry's header; length of its code; architecture).
"""

from __future__ import annotations

import argparse
import struct
import sys
from collections import Counter
from pathlib import Path

MAGIC = struct.pack("<I", 0xBA55ED50)
HEADER = struct.Struct("<IHHQ")
ENTRY = struct.Struct("<HHIQ")
ARCHITECTURE, SHORTEST, LONGEST, MACHINE_CODE = 28, 64, 4096, 2


def clear_others(library: bytearray, arch: int) -> tuple[int, int]:
    """Zero what is not machine code for `arch`; bytes that are kept, and that were cleared.

    Raises:
        ValueError: there is no machine code for `arch`, or what looks like a fat binary is none.
    """
    kept, cleared = 0, Counter[int]()
    at = library.find(MAGIC)
    while at >= 0:
        _, version, header, size = HEADER.unpack_from(library, at)
        end = at + header + size
        if version != 1 or header != HEADER.size or end > len(library):
            at = library.find(MAGIC, at + 1)  # four bytes that happen to be the same
            continue
        entry = at + header
        while entry < end:
            kind, _, own, code = ENTRY.unpack_from(library, entry)
            if not (SHORTEST <= own <= LONGEST and entry + own + code <= end):
                raise ValueError(f"at byte {entry:,}: an entry of a fat binary has {own:,} and {code:,} bytes")
            (its,) = struct.unpack_from("<I", library, entry + ARCHITECTURE)
            if its == arch and kind == MACHINE_CODE:
                kept += code
            else:
                cleared[its] += code
                library[entry + own : entry + own + code] = bytes(code)
            entry += own + code
        at = library.find(MAGIC, end)
    if not kept:
        raise ValueError(f"there is no machine code for architecture {arch}; there is for {sorted(cleared) or 'none'}")
    return kept, cleared.total()


def main() -> int:
    """Read, clear, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("output", type=Path, help="another file")
    parser.add_argument(
        "--arch", type=int, default=90, help="compute capability without its point (default: 90, Hopper)"
    )
    given = parser.parse_args()
    library = bytearray(given.library.read_bytes())
    try:
        kept, cleared = clear_others(library, given.arch)
    except ValueError as error:
        print(f"{given.library}: {error}", file=sys.stderr)
        return 2
    given.output.write_bytes(library)
    print(f"{kept / 1e6:,.0f} MB of code for {given.arch} kept, {cleared / 1e6:,.0f} MB for others cleared")
    return 0


if __name__ == "__main__":
    sys.exit(main())
