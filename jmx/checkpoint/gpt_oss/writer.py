"""Writing a gpt-oss checkpoint in another form, tensor by tensor."""

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jmx.checkpoint import shards
from jmx.checkpoint.gpt_oss import tensor_names
from jmx.checkpoint.gpt_oss.reader import Reader
from jmx.checkpoint.gpt_oss.storage import ORBAX, write_orbax
from jmx.checkpoint.gpt_oss.tensor_names import FileTensor
from jmx.checkpoint.model_configs.gpt_oss import FILE, GENERATION_FILE, entries, read_config, token_entries
from jmx.checkpoint.progress import progress_bar
from jmx.checkpoint.shards import CheckpointError, Output
from jmx.util import atomic_files
from jmx.util.checks import check_bool, check_one_of, check_path
from jmx.util.typing import Shaped

FORMS = (*tensor_names.FORMS, ORBAX)

# Files that are copied with the weights.
COMPANIONS = (
    GENERATION_FILE,
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "LICENSE*",
    "USAGE_POLICY*",
)

DTYPES_FILE = "dtypes.json"  # of the original form: the type of each tensor


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    form: str = "hf",
    *,
    max_shard_bytes: int = 5_000_000_000,
    progress: bool = False,
) -> None:
    """Writes the checkpoint `src` as a new directory `dst` in any form, with the same bits.

    Weights are copied one tensor at a time (one layer for Orbax), and never decoded. The config is rewritten if the
    form's spelling differs; tokenizer files, generation_config.json and licenses are copied.

    Args:
        src: a checkpoint in any of the forms.
        dst: must not exist. It appears when it is complete; a failure leaves nothing behind.
        form: "hf" (Hugging Face), "original", or "orbax": config.json, an Orbax checkpoint `top`, and one per
            layer, `layers/0` and so on. Each is a flat dict of arrays by the names of `Reader`, and of
            `Experts.arrays` for the experts, in canonical dtypes (float4_e2m1fn, float8_e8m0fnu).
        max_shard_bytes: the most bytes of tensors in one file, unless a single tensor has more. Ignored for "orbax".
        progress: whether to show a progress bar on stderr, if that is a terminal.

    Raises:
        CheckpointError: `src` is wrong or broken, or its config cannot be written in `form`.
        FileExistsError, FileNotFoundError: `dst` exists, or the directory that should hold it does not.
        ValueError: an unknown `form`; `dst` is, contains or is inside `src`; `max_shard_bytes` is below 1.
    """
    check_path("src", src)
    check_path("dst", dst)
    check_one_of("form", form, [*FORMS])
    check_bool("progress", progress)
    shards.check_shard_size(max_shard_bytes)
    atomic_files.check_apart(dst=dst, src=src)
    with atomic_files.new_path(dst) as directory:
        reader = Reader(src)
        directory.mkdir()
        _write_config(reader, directory, form)
        with progress_bar("converting", reader.nbytes(), progress) as advance:
            _write_weights(reader, directory, form, max_shard_bytes, advance)


def _write_config(reader: Reader, directory: Path, form: str) -> None:
    for pattern in COMPANIONS:
        for file in reader.path.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, directory / file.name)
    if (form == "original") == (reader.form == "original"):
        shutil.copyfile(reader.path / FILE, directory / FILE)
        return
    atomic_files.write_json(directory / FILE, entries(reader.config, "original" if form == "original" else "hf"))
    generation = directory / GENERATION_FILE
    if form == "original" and (ids := token_entries(reader.config)):  # its config.json has no place for them
        atomic_files.write_json(generation, (shards.read_json(generation) if generation.exists() else {}) | ids)
    ours, written = dataclasses.asdict(reader.config), dataclasses.asdict(read_config(directory))
    for name, value in ours.items():
        if written[name] != value:
            raise CheckpointError(
                reader.path / FILE,
                f"`{name}` (={value!r}) must be {written[name]!r} for the {form} form, which has no key for it",
            )


def _write_weights(
    reader: Reader, directory: Path, form: str, max_shard_bytes: int, advance: Callable[[int], object]
) -> None:
    def view(name: str) -> Shaped[np.ndarray, "..."]:
        tensor = reader.store.view(name)
        reader.check_scales(name, tensor)
        return tensor

    if form == ORBAX:
        write_orbax(directory, reader.config, view, advance)
        return

    def output(tensor: FileTensor) -> Output:
        names = [member.name for member in tensor.members]
        return Output(tensor.name, reader.store.dtype(names[0]), tensor.shape, lambda: map(view, names))

    tensors = tensor_names.file_tensors(tensor_names.FORMS[form], reader.config)
    outputs = [output(tensor) for tensor in tensors]
    shards.write(directory, outputs, max_shard_bytes, advance)
    if form == "original":
        kinds = {".blocks": "FP4", ".scales": "UE8"}
        meanings = {output.name: kinds.get(Path(output.name).suffix, output.dtype) for output in outputs}
        atomic_files.write_json(directory / DTYPES_FILE, meanings)
