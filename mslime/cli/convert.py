"""`mslime convert` and its subcommands."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mslime.cli.command import Command, config_of
from mslime.config.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from mslime.offline.inspect import Side
    from mslime.offline.jobs import ConversionJob

DTYPES = ("bfloat16", "float32", "float16")


def _add_kinds(parser: Any) -> None:
    kinds = parser.add_subparsers(required=True, metavar="WHAT")
    kinds.add_parser("run", help=CONVERT_RUN.about)  # only for the list; `CONVERT_RUN` has a parser with the settings
    to_megatron = _writing(kinds, "to-megatron", "Hugging Face -> Megatron torch_dist", "HF", "Hugging Face directory")
    to_megatron.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: as in the source)")
    to_megatron.add_argument(
        "--ignore-field", action="append", default=[], metavar="NAME",
        help="unknown field of config.json that does not affect the model; may be repeated",
    )  # fmt: skip
    to_megatron.set_defaults(convert=_to_megatron)
    to_hf = _writing(kinds, "to-hf", "Megatron torch_dist, converted or of a run -> Hugging Face", "CKPT",
                     "directory with .metadata and *.distcp")  # fmt: skip
    to_hf.add_argument(
        "--source", type=Path,
        help="Hugging Face directory of the same model, for config.json, tokenizer and untrained weights (default: the "
        "files kept by to-megatron)",
    )  # fmt: skip
    to_hf.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: config.json's)")
    to_hf.set_defaults(convert=_to_hf)
    fp8 = _writing(kinds, "fp8", "quantise to FP8 with a scale for 128 x 128 weights", "HF", "Hugging Face directory")
    fp8.add_argument(
        "--scale", choices=("float32", "ue8m0"), default="float32",
        help="exact scales, or powers of two (as DeepSeek-V3.1 publishes and Blackwell kernels need)",
    )  # fmt: skip
    fp8.add_argument("--include", metavar="REGEX", help="weights to quantise (default: projections of decoder layers)")
    fp8.set_defaults(convert=_fp8)
    plain = _writing(kinds, "bf16", "dequantise FP8, INT4 or MXFP4", "HF", "quantised Hugging Face directory")
    plain.add_argument("--dtype", choices=DTYPES, help="dtype of dequantised weights (default: config.json's)")
    plain.set_defaults(convert=_plain)
    int4 = _writing(kinds, "int4", "quantise routed experts to compressed-tensors INT4", "HF", "Hugging Face directory")
    int4.add_argument("--group", type=int, default=32, help="inputs that share a scale (default: %(default)s)")
    int4.add_argument("--include", metavar="REGEX", help="weights to quantise (default: routed experts)")
    int4.set_defaults(convert=_int4)
    merge = _writing(kinds, "merge-lora", "add an adapter in peft's format to the weights of its model", "HF",
                     "Hugging Face directory of the model")  # fmt: skip
    merge.add_argument(
        "--adapter",
        type=Path,
        required=True,
        metavar="DIR",
        help="directory with adapter_config.json and its safetensors",
    )
    merge.set_defaults(convert=_merge_lora)
    _add_inspect(kinds)
    _add_compare(kinds)


def _writing(kinds: Any, name: str, about: str, source: str, source_help: str) -> argparse.ArgumentParser:
    """Add a subcommand that writes a checkpoint."""
    parser = kinds.add_parser(
        name, help=about, description=f"{about[0].upper()}{about[1:]}.",
        epilog="If it is killed or the disk is full, finished files remain in a hidden directory beside OUT, and the "
        "same command continues from there. OUT appears when everything is written and verified.",
    )  # fmt: skip
    parser.add_argument("source_dir", metavar=source, type=Path, help=source_help)
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to write; must not exist")
    _add_workers(parser)
    parser.add_argument(
        "--max-shard-gib", type=float, default=5.0, metavar="GIB", help="largest file (default: %(default)s)"
    )
    parser.add_argument("--no-verify", action="store_true", help="do not verify the written files at the end")
    parser.add_argument("--dry-run", action="store_true", help="check the source and show what would be written")
    return parser


def _add_workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers", type=int, default=min(os.cpu_count() or 1, 8), metavar="N",
        help="processes; each holds one tensor group in memory (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _add_inspect(kinds: Any) -> None:
    parser = kinds.add_parser(
        "inspect", help="contents of this checkpoint: tensors, bytes, dtypes, layout, step, family"
    )
    parser.add_argument("checkpoint", type=Path, help="Hugging Face or Megatron torch_dist directory")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--verify", action="store_true", help="read all weights and compare the stored checksums")
    _add_workers(parser)
    parser.set_defaults(convert=_inspect)


def _add_compare(kinds: Any) -> None:
    parser = kinds.add_parser(
        "compare", help="equal, or which tensors differ and by how much",
        description="Compare two checkpoints of either kind under Hugging Face names; exit status 1 if they differ.",
    )  # fmt: skip
    parser.add_argument("a", metavar="A", type=Path)
    parser.add_argument("b", metavar="B", type=Path)
    parser.add_argument("--source", type=Path, help="Hugging Face directory of a training checkpoint's model")
    parser.add_argument("--values", action="store_true", help="the same values in another dtype count as equal")
    parser.add_argument("--limit", type=int, default=20, help="differences to show (default: %(default)s)")
    _add_workers(parser)
    parser.set_defaults(convert=_compare)


def _to_megatron(args: argparse.Namespace) -> int:
    from mslime.convert.families import read_hf_config
    from mslime.offline.jobs import refuse_existing
    from mslime.offline.to_megatron import ToMegatron
    from mslime.run.run_checkpoints import placement

    refuse_existing(args.out)
    config = read_hf_config(args.source_dir)
    job = ToMegatron(
        args.source_dir, config, placement(config, args.source_dir), dtype=args.dtype, ignored=args.ignore_field,
        max_file_bytes=_bytes(args),
    )  # fmt: skip
    return _run(job, args)


def _to_hf(args: argparse.Namespace) -> int:
    from mslime.offline.jobs import refuse_existing
    from mslime.run.run_checkpoints import export_job

    refuse_existing(args.out)
    return _run(export_job(args.source_dir, args.source, dtype=args.dtype, max_shard_bytes=_bytes(args)), args)


def _fp8(args: argparse.Namespace) -> int:
    from mslime.convert.encoding import PROJECTIONS
    from mslime.offline.requantise import ToFp8

    job = ToFp8(
        args.source_dir, power_of_two=args.scale == "ue8m0", include=args.include or PROJECTIONS,
        max_shard_bytes=_bytes(args),
    )  # fmt: skip
    return _run(job, args)


def _plain(args: argparse.Namespace) -> int:
    from mslime.offline.requantise import ToPlain

    return _run(ToPlain(args.source_dir, args.dtype, max_shard_bytes=_bytes(args)), args)


def _int4(args: argparse.Namespace) -> int:
    from mslime.convert.encoding import EXPERTS
    from mslime.offline.requantise import ToInt4

    job = ToInt4(args.source_dir, group=args.group, include=args.include or EXPERTS, max_shard_bytes=_bytes(args))
    return _run(job, args)


def _merge_lora(args: argparse.Namespace) -> int:
    from mslime.offline.lora_checkpoints import MergeLora

    return _run(MergeLora(args.source_dir, args.adapter, _bytes(args)), args)


def _bytes(args: argparse.Namespace) -> int:
    if args.max_shard_gib <= 0:
        raise ConfigError("--max-shard-gib", args.max_shard_gib, "must be positive", "remove it for the default, 5 GiB")
    return int(args.max_shard_gib * (1 << 30))


def _run(job: ConversionJob, args: argparse.Namespace) -> int:
    """Run a conversion, or only describe it."""
    from rich.console import Console

    from mslime.observe.progress import ConversionBars
    from mslime.offline.inspect import size_text
    from mslime.offline.jobs import refuse_existing, run_job

    _check_workers(args)
    refuse_existing(args.out)
    console = Console(stderr=True)
    total = sum(task.nbytes for task in job.tasks)
    if args.dry_run:
        for task in job.tasks:
            print(f"{task.file}  {size_text(task.nbytes)}  {len(task.names)} from {task.names[0]} to {task.names[-1]}")
        print(f"{args.out}: {len(job.tasks)} files, {size_text(total)}; nothing written (--dry-run)")
        return 0
    with ConversionBars(console, args.quiet) as bars:
        done = run_job(job, args.out, workers=args.workers, verified=not args.no_verify, progress=bars)
    kept = f", {done.kept_files} of them from an earlier run" if done.kept_files else ""
    checked = "" if args.no_verify else ", checksums verified"
    print(f"{args.out}: {done.files} files{kept}, {size_text(done.nbytes)}{checked}")
    return 0


def _check_workers(args: argparse.Namespace) -> None:
    if args.workers < 1:
        raise ConfigError("--workers", args.workers, "must be at least 1", "remove it for the default")


def _inspect(args: argparse.Namespace) -> int:
    from rich.console import Console

    from mslime.observe.progress import ConversionBars
    from mslime.offline.inspect import inspect, size_text
    from mslime.offline.jobs import Workers, read_checksums, verify_files

    _check_workers(args)
    summary = inspect(args.checkpoint)
    print(f"{args.checkpoint}: {summary.kind}")
    for name, value in summary.facts:
        print(f"  {name}: {value}")
    for dtype, tensors, nbytes in summary.by_dtype():
        print(f"  {dtype}: {tensors} tensors, {size_text(nbytes)}")
    for entry in summary.entries if args.tensors else ():
        print(f"{entry.name}  {entry.dtype} {list(entry.shape)}  {size_text(entry.nbytes)}  {entry.file}")
    if args.verify:
        sums = read_checksums(args.checkpoint)
        if not sums:
            raise CheckpointError(
                str(args.checkpoint), None, "has no checksums; training checkpoints and converted checkpoints of "
                "mslime have them", "remove --verify",
            )  # fmt: skip
        files = {args.checkpoint / name: found for name, found in sums.items()}
        with ConversionBars(Console(stderr=True), args.quiet) as bars, Workers(args.workers) as pool:
            verify_files(files, pool, bars)
        print(f"  checksums: all {len(files)} files match")
    return 0


def _compare(args: argparse.Namespace) -> int:
    from rich.console import Console

    from mslime.observe.progress import ConversionBars
    from mslime.offline.inspect import compare

    _check_workers(args)
    a, b = _sides(args)
    with ConversionBars(Console(stderr=True), args.quiet) as bars:
        found = compare(a, b, workers=args.workers, progress=bars)
    counted = [d for d in found if not (args.values and d.what == "dtype")]
    for difference in counted[: args.limit]:
        largest = f", largest difference {difference.largest:.3g}" if difference.what == "values" else ""
        print(f"{difference.name}: {difference.what}: {difference.detail}{largest}")
    if len(counted) > args.limit:
        print(f"... and {len(counted) - args.limit} more (--limit)")
    names = len(a.shapes.keys() | b.shapes.keys())
    print(f"{len(counted)} of {names} tensors differ" if counted else f"equal: {names} tensors")
    return 1 if counted else 0


def _sides(args: argparse.Namespace) -> tuple[Side, Side]:
    """The two checkpoints. The model of a training checkpoint is given by the other one, or by --source."""
    from mslime.convert.families import read_hf_config
    from mslime.convert.torch_dist import is_torch_dist
    from mslime.offline.inspect import HFSide, MegatronSide
    from mslime.offline.to_hf import side_files
    from mslime.run.run_checkpoints import placement

    paths = (args.a, args.b)
    hugging_face = next((path for path in paths if not is_torch_dist(path)), None)
    sides: list[Side] = []
    for path in paths:
        if not is_torch_dist(path):
            sides.append(HFSide(path))
            continue
        own = (path / "hf" / "config.json").exists()
        config = read_hf_config(side_files(path, args.source or (None if own else hugging_face)))
        sides.append(MegatronSide(path, config, placement(config, path)))
    return sides[0], sides[1]


def _add_run(parser: Any) -> None:
    parser.add_argument("config", type=Path, help="the run's config.yaml")
    parser.add_argument("--checkpoint", type=Path, help="checkpoint directory (default: the run's newest complete one)")
    parser.add_argument("--out", type=Path, required=True, help="directory to write; must not exist")


def _export_run(args: argparse.Namespace) -> int:
    from mslime.run.run_checkpoints import export, newest_of

    config = config_of(args)
    config.refuse_several("an export")
    checkpoint = args.checkpoint or newest_of(config.run_dir)
    export(checkpoint, config.model.path, args.out, quiet=config.observe.progress == "off")
    print(args.out)
    return 0


CONVERT_RUN = Command(
    "write a run's checkpoint as a Hugging Face checkpoint", _add_run, _export_run, takes_settings=True
)
CONVERT = Command("convert, inspect and compare checkpoints", _add_kinds, lambda args: args.convert(args))
