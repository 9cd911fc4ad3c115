"""The words of `shoal model`, and what its answers look like."""

import argparse
import sys
from pathlib import Path
from typing import Any

from chassis.model_repository import Manifest, ModelRepository, default_folder
from shoal import models
from shoal.models import Asked

MIB = 1 << 20


def add_words(parser: argparse.ArgumentParser) -> None:
    """Of `shoal model`."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    add = actions.add_parser("add", help="put a model into the repository")
    add.add_argument("source", help="GGUF file, Hugging Face folder or a packaged name (smollm2)")
    add.add_argument("--name", default="", help="default: after the file or folder")
    add.add_argument("--version", default="", help="default: the next number")
    add.add_argument("--link", action="store_true", help="link to the files instead of copying them")
    add.set_defaults(do=_add)

    known = actions.add_parser("list", help="what is in the repository")
    known.set_defaults(do=_list)

    check = actions.add_parser("check", help="load it, verify its digests, try it, say what it takes")
    check.add_argument("model", help="name[:version], or a path")
    check.add_argument("--stages", type=int, default=2, help="to propose a split for")
    add_precision(check)
    check.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N or auto")
    check.add_argument("--threads", type=int, default=1)
    check.set_defaults(do=_check)

    remove = actions.add_parser("remove", help="take a version out of the repository")
    remove.add_argument("model", help="name:version; the name alone where there is one version")
    remove.set_defaults(do=_remove)
    for action in (add, known, check, remove):
        add_repository(action)


def add_repository(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--repository",
        type=Path,
        metavar="DIR",
        help="models with versions (default: in the user's data folder)",
    )


def add_precision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of what is not quantised")
    parser.add_argument(
        "--quantize",
        choices=["none", "keep", "int8", "int4"],
        help="weights in so few bits; keep: as packed in the file",
    )
    parser.add_argument(
        "--int8-activations",
        action=argparse.BooleanOptionalAction,
        help="multiply packed weights by 8-bit numbers: faster, less exact (default: with int8 and int4)",
    )


def repository_of(arguments: argparse.Namespace) -> ModelRepository:
    return ModelRepository(arguments.repository or default_folder())


def _add(arguments: argparse.Namespace) -> int:
    repository = repository_of(arguments)
    manifest = models.add(
        repository, arguments.source, arguments.name, arguments.version, link=arguments.link
    )
    where = f" --repository {arguments.repository}" if arguments.repository else ""
    _tell(f"{_line(manifest)}\nserve it with: shoal up --model {manifest.name}:{manifest.version}{where}")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    repository = repository_of(arguments)
    found = repository.models()
    _tell("\n".join(map(_line, found)) if found else f"no models in {repository.folder}")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    asked = Asked(
        stages=arguments.stages,
        dtype=arguments.dtype or "float32",
        quantize=arguments.quantize or "none",
        int8_activations=arguments.int8_activations,
        device=arguments.device,
        threads=arguments.threads,
    )
    manifest, told = models.check(repository_of(arguments), arguments.model, asked)
    if manifest is not None:
        _tell(f"{len(manifest.files)} files are what was added")
    _tell(report(told))
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    manifest = models.remove(repository_of(arguments), arguments.model)
    _tell(f"removed {manifest.name}:{manifest.version}")
    return 0


def _line(manifest: Manifest) -> str:
    linked = "  linked" if manifest.linked else ""
    return (
        f"{manifest.name}:{manifest.version}  {manifest.family}  {manifest.num_bytes / MIB:.0f} MiB"
        f"  {manifest.added_at}  {manifest.digest[:12]}{linked}"
    )


def report(told: dict[str, Any]) -> str:
    """What a worker's check found, for people."""
    formats = ", ".join(f"{count} matrices {name}" for name, count in told["formats"].items())
    rounded = ", 8-bit activations" if told["int8_activations"] else ""
    lines = [
        f"{told['family']}, {told['num_layers']} layers, vocabulary {told['vocab_size']},"
        f" context {told['context_len_max']}",
        f"{formats or 'not described here'}; {told['stored_bytes'] / MIB:.0f} MiB on disk",
        f"digest {told['digest']}",
        f"{told['dtype']}, quantize {told['quantize']}{rounded}: {len(told['ids'])} greedy tokens,"
        f" the same twice",
        f"one step of {told['rows']} sequences, in processor time: layers"
        f" {min(told['layer_us']) / 1e3:.2f} to {max(told['layer_us']) / 1e3:.2f} ms,"
        f" head {told['head_us'] / 1e3:.2f} ms",
        f"proposed split over {len(told['stages'])}:",
    ]
    for index, stage in enumerate(told["stages"]):
        lines.append(
            f"  stage {index}: layers {stage['first_layer']} to {stage['end_layer'] - 1},"
            f" {stage['step_us'] / 1e3:.1f} ms, weights {stage['weight_bytes'] / MIB:.0f} MiB,"
            f" KV {stage['kv_bytes_per_token'] / 1024:.1f} KiB a token"
        )
    return "\n".join(lines)


def _tell(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
