"""Turns GSM8K's rows into prompts for mslime.

    python examples/gsm8k/prepare.py data/gsm8k/main/train-00000-of-00001.parquet data/gsm8k/train.jsonl

A row of GSM8K has a `question`, and an `answer` that reasons and ends in `#### 18`. The output
has one JSON object per line: `prompt`, a list with one message of the user for the chat template, and `label`,
the number.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from mslime.config.errors import DataError, UserError
from mslime.data.row_files import open_rows

INSTRUCTION = "Reason step by step, and put the final answer into \\boxed{}."
_END = re.compile(r"####\s*(-?[\d,]*\.?\d+)\s*$")


def main(arguments: list[str] | None = None) -> int:
    """Convert one file; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a .parquet or .jsonl file of GSM8K")
    parser.add_argument("out", type=Path, help="the .jsonl file to write; its directory is created if missing")
    given = parser.parse_args(arguments)
    try:
        rows = convert_file(given.source)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{given.out}: {len(rows)} rows; first label: {rows[0]['label']}")
    return 0


def convert_file(path: Path) -> list[dict[str, Any]]:
    """All rows of a file, converted. Raises DataError that names the file, or its first row that is not GSM8K's."""
    if not path.exists():
        raise DataError("source", str(path), "no such file", "download it first: docs/tutorial.md, step 2")
    file = open_rows(path, ("question", "answer"))
    rows = [convert(file[i], file.where(i)) for i in range(len(file))]
    if not rows:
        raise DataError("source", str(path), "has no rows", "download it again")
    return rows


def convert(row: dict[str, Any], where: str) -> dict[str, Any]:
    """One row. Raises DataError that begins with `where`."""
    question, answer = row.get("question"), row.get("answer")
    if not isinstance(question, str) or not question.strip():
        raise DataError(where, question, "question must be text", "fix or delete the row")
    end = _END.search(answer) if isinstance(answer, str) else None
    if end is None:
        raise DataError(where, answer, "answer must end in #### and a number", "fix or delete the row")
    message = {"role": "user", "content": f"{question.strip()}\n{INSTRUCTION}"}
    return {"prompt": [message], "label": end[1].replace(",", "")}


if __name__ == "__main__":
    sys.exit(main())
