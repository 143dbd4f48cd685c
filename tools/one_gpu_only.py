"""Remove the code for all GPUs but one kind from a shared library, so that it compresses to a fraction:

    python tools/one_gpu_only.py libtransformer_engine.so trimmed.so [--arch 90]

For a machine without network to which little can be copied. The file keeps its length and addresses; the machine code
and the PTX for other kinds become zeros, which the driver never reads if it finds code for its own. Of Transformer
Engine 2.20.2 (343 MB) `xz` then leaves 24 MB.

nvcc writes fat binaries in this format: a header (magic, version, length of the header, length of the rest) and entries
(kind: 1 PTX, 2 machine code; length of the entry's header; length of its code; architecture).
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
    """Zero all code but the machine code for `arch`; returns the numbers of bytes kept and cleared.

    Raises:
        ValueError: there is no machine code for `arch`, or an apparent fat binary is invalid.
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
                raise ValueError(f"at byte {entry:,}: invalid entry of a fat binary, of {own:,} and {code:,} bytes")
            (its,) = struct.unpack_from("<I", library, entry + ARCHITECTURE)
            if its == arch and kind == MACHINE_CODE:
                kept += code
            else:
                cleared[its] += code
                library[entry + own : entry + own + code] = bytes(code)
            entry += own + code
        at = library.find(MAGIC, end)
    if not kept:
        raise ValueError(f"no machine code for architecture {arch}; found: {sorted(cleared) or 'none'}")
    return kept, cleared.total()


def main() -> int:
    """Read, clear, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("output", type=Path, help="a different file")
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
