"""Turns a policy's checkpoint into a Hugging Face folder or a GGUF file, without a running mesh.

python -m rolemesh.engine.train.export --checkpoint DIR --model DIR --out DIR

The checkpoint of an adapter becomes the adapter's folder, in PEFT's format, or with --merge a whole
model. With --gguf a whole model becomes one file, which llama.cpp serves.

Shape letters: I inputs, O outputs, R rank.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import AutoModelForCausalLM

from rolemesh.engine.layout.adapters import (
    EXPERTS,
    STACKS,
    factor_name,
    factors_beside,
    split_factor,
)
from rolemesh.engine.layout.families import known_shape
from rolemesh.engine.layout.manifest import Manifest, Parameter
from rolemesh.engine.model_folders.pretrained import stop_tokens_of
from rolemesh.engine.models.adapters.adapter_files import adapter_config
from rolemesh.engine.models.adapters.adapters import (
    adapted_parameters,
    factor_shapes,
    module_in_layer,
)
from rolemesh.engine.models.adapters.base_identity import BaseIdentity
from rolemesh.engine.models.buffers import saved_buffers
from rolemesh.engine.models.folder import read_config
from rolemesh.engine.models.parameter_files import ParameterFiles
from rolemesh.engine.specs import AdapterSpec, ComputeDtype, GgufType, ModelSpec
from rolemesh.engine.train.state import check_base, check_fits
from rolemesh.engine.weights.checkpoints.checkpoint import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointReader,
    open_checkpoint,
)
from rolemesh.engine.weights.checkpoints.export import write_adapter_folder, write_model_folder


def export_policy(
    checkpoint: Path,
    model: Path,
    directory: Path,
    dtype: ComputeDtype | None = None,
    *,
    merges: bool = False,
    gguf: GgufType | None = None,
    base_name: str | None = None,
    base_revision: str | None = None,
) -> str:
    """Writes the folder, or file, and returns what it holds, for people.

    Reads one parameter after another, whatever layout wrote them: it takes the memory of one file.

    Args:
        checkpoint: Folder that the actor wrote.
        model: Folder of the model that the run started from: config and tokenizer come from it, and
            beneath an adapter its weights.
        directory: The folder to write; with gguf the file.
        dtype: Type of the saved weights; None: bfloat16, but float32 for an adapter's folder.
        merges: Whether an adapter becomes a part of its base, in a whole model.
        gguf: Type of the matrices of a GGUF file; None: a folder is written.
        base_name: What an adapter's folder calls its base, e.g. ORG/NAME; None: by its path.
        base_revision: Commit of the base at the hub.

    Raises:
        ValueError: A folder cannot be used, or they do not belong together, or llama.cpp would
            compute something else than the model.
        ModuleNotFoundError: gguf is given, and its package is not installed.
        CheckpointCorruptError: A file of the checkpoint is missing, cut or changed.
    """
    reader = open_checkpoint(checkpoint)
    is_adapter = "base" in reader.state
    if merges and not is_adapter:
        raise ValueError(
            f"--merge is given, but checkpoint {str(checkpoint)!r} is of a whole model, not of an "
            "adapter: leave it out"
        )
    if gguf is not None and dtype is not None:
        raise ValueError(
            f"--dtype is {dtype} beside --gguf {gguf}, which says the type: leave --dtype out"
        )
    if gguf is not None and is_adapter and not merges:
        raise ValueError(
            f"--gguf is {gguf}, and checkpoint {str(checkpoint)!r} is of an adapter: give --merge, "
            "which adds it to its base"
        )
    if is_adapter and not merges and dtype not in (None, "float32"):
        raise ValueError(
            f"--dtype is {dtype}, but the folder of an adapter has float32: leave it out, or give "
            "--merge, which writes a whole model"
        )
    config = read_config(ModelSpec(path=model))
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    if is_adapter and not merges:
        named: dict[str, Any] = {}
        if base_name is not None:
            named = {"base_model_name_or_path": base_name, "revision": base_revision}
        _write_adapter(reader, lm, model, directory, named)
        return f"policy_version {reader.state['policy_version']}, adapter in float32"
    manifest = {
        name: Parameter(tuple(weight.shape), "float32") for name, weight in lm.named_parameters()
    }
    for name, buffer in saved_buffers(lm):
        manifest[name] = Parameter(tuple(buffer.shape), "float32", keeps_dtype=True)
    chosen = gguf or dtype or "bfloat16"
    shape = known_shape(config.to_dict())
    if gguf is None:

        def write(parameters: Iterator[tuple[str, torch.Tensor]]) -> None:
            write_model_folder(
                directory,
                config=config,
                architecture=type(lm).__name__,
                manifest=manifest,
                parameters=parameters,
                source=model,
                shape=shape,
                dtype=dtype or "bfloat16",
            )

    else:
        # Here: its package is not needed for a folder.
        from rolemesh.engine.llama_cpp.gguf_file import GgufFile

        write = GgufFile(
            directory,
            gguf,
            config=config,
            manifest=manifest,
            source=model,
            stop_tokens=stop_tokens_of(model, config),
        ).write
    if merges:
        spec = _checked_adapter(reader, lm, model)
        with ParameterFiles(model, shape) as base:
            write(_merged(reader, base, manifest, spec.scale))
    else:
        check_fits(reader, "policy", manifest)
        write(reader.whole("weights", manifest))
    return f"policy_version {reader.state['policy_version']}, {chosen}"


def _write_adapter(
    reader: CheckpointReader, lm: Any, model: Path, directory: Path, named: Mapping[str, Any]
) -> None:
    """Writes the folder of an adapter, whose config calls its base as it is named."""
    spec = _checked_adapter(reader, lm, model)
    manifest = reader.parameters("weights")
    targets = {module_in_layer(split[0]): None for split in map(split_factor, manifest) if split}
    config = adapter_config(spec, list(targets), model, "CAUSAL_LM")
    write_adapter_folder(
        directory,
        config={**config, **named},
        manifest=manifest,
        parameters=reader.whole("weights", manifest),
        source=model,
    )


def _checked_adapter(reader: CheckpointReader, lm: Any, model: Path) -> AdapterSpec:
    """The adapter that a checkpoint holds.

    Args:
        reader: The checkpoint.
        lm: The base, on the meta device.
        model: Folder of the base.

    Raises:
        CheckpointMismatchError: It was trained on another base, or has not the factors that it
            says.
    """
    spec = _adapter_of(reader)
    check_base(reader, BaseIdentity(model, scale=spec.scale))
    manifest = {}
    for module, parameter in adapted_parameters(lm, spec).items():
        for name, shape in factor_shapes(module, parameter, spec.rank).items():
            manifest[name] = Parameter(shape, "float32")
    check_fits(reader, "policy", manifest)
    return spec


def _adapter_of(reader: CheckpointReader) -> AdapterSpec:
    """What a checkpoint says of its adapter; of one that says little, what its factors tell."""
    state: Mapping[str, Any] = reader.state
    if "adapter" in state:
        return AdapterSpec.model_validate(state["adapter"])
    found = {
        name: parameter
        for name, parameter in reader.parameters("weights").items()
        if name.endswith(factor_name("", "A"))
    }
    if not found:
        raise CheckpointMismatchError(
            f"checkpoint {str(reader.directory)!r} has no factor of an adapter: give the one of "
            "the actor"
        )
    rank = next(iter(found.values())).shape[-2]
    modules = {module_in_layer(name.removesuffix(factor_name("", "A"))): None for name in found}
    targets = dict.fromkeys(EXPERTS if one in STACKS else one for one in modules)
    alpha = float(state["base"]["scale"]) * rank
    return AdapterSpec(rank=rank, alpha=alpha, targets=tuple(targets))


def _merged(
    reader: CheckpointReader, base: ParameterFiles, manifest: Manifest, scale: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields W + scale * B A, or W where there is no adapter, float32, in the manifest's order.

    The sum is that of PEFT's merge_and_unload.

    Args:
        reader: The checkpoint, with the factors.
        base: Tensors of the base.
        manifest: Parameters of the base.
        scale: Of the adapter.
    """
    pairs = {name: factors_beside(name) for name in manifest}
    held = reader.parameters("weights")
    adapted = {name: pair for name, pair in pairs.items() if pair[0] in held}
    # One walk over the checkpoint, whose files are hashed once.
    factors = reader.whole("weights", [factor for pair in adapted.values() for factor in pair])
    for name, parameter in manifest.items():
        key = base.stored_name(name)
        if key is None or base.shape(key) != parameter.shape:
            found = "lacks it" if key is None else f"has it with the shape {list(base.shape(key))}"
            raise ValueError(
                f"{name!r} has the shape {list(parameter.shape)} in the model, but its folder "
                f"{str(base.folder)!r} {found}: export the adapter without --merge, and merge it "
                "with PEFT"
            )
        weight = base.read(key, tuple((0, size) for size in parameter.shape))
        if name in adapted:
            (_, a), (_, b) = next(factors), next(factors)
            # Of experts, of each by itself.
            weight += (b @ a) * scale
        yield name, weight


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m rolemesh.engine.train.export", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder the actor wrote")
    parser.add_argument("--model", type=Path, required=True, help="model the run started from")
    parser.add_argument("--out", type=Path, required=True, help="folder to write, or file")
    parser.add_argument(
        "--dtype",
        choices=get_args(ComputeDtype),
        help="type of the weights (default: bfloat16, and float32 in an adapter's folder)",
    )
    parser.add_argument(
        "--merge", action="store_true", help="add an adapter to its base: write a whole model"
    )
    parser.add_argument(
        "--gguf",
        choices=get_args(GgufType),
        help="write one GGUF file for llama.cpp, with matrices of this type",
    )
    parser.add_argument(
        "--base-name", help="what an adapter's folder calls its base, in place of --model"
    )
    parser.add_argument("--base-revision", help="commit of the base at the hub")
    options = parser.parse_args(arguments)
    try:
        told = export_policy(
            options.checkpoint,
            options.model,
            options.out,
            options.dtype,
            merges=options.merge,
            gguf=options.gguf,
            base_name=options.base_name,
            base_revision=options.base_revision,
        )
    except ModuleNotFoundError as error:
        if error.name != "gguf":
            raise
        print("error: --gguf needs the package gguf: pip install 'gguf>=0.19'", file=sys.stderr)
        return 1
    except (ValueError, CheckpointCorruptError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.out}: {told}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
