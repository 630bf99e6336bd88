"""Checkpoints with one thing wrong: their files taken apart into headers, JSON and bytes, changed, and put together.

A mutation records which tensors it touched, and whether a loader must reject the result. All of them
come from one random generator, so that its seed gives the same files again.
"""

import contextlib
import copy
import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jmx.checkpoint.shards import DTYPES

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
QUANTIZATION = "hf_quant_config.json"  # of ModelOpt's older versions: beside it config.json need not say anything

Files = dict[str, bytes]


class Object(list[list[Any]]):
    """A JSON object as its [key, value] pairs: so that a key may be there twice."""

    def get(self, key: str) -> Any:
        return next(value for name, value in self if name == key)

    def put(self, key: str, value: Any) -> None:
        next(pair for pair in self if pair[0] == key)[1] = value


class Raw(str):
    """Text that is written into JSON unchanged."""


def parse(text: bytes) -> Any:
    return json.loads(text, object_pairs_hook=lambda pairs: Object([*map(list, pairs)]))


def spell(node: Any) -> str:
    if isinstance(node, Raw):
        return node
    if isinstance(node, Object):
        return "{" + ",".join(f"{json.dumps(key)}:{spell(value)}" for key, value in node) + "}"
    if isinstance(node, list):
        return "[" + ",".join(map(spell, node)) + "]"
    return json.dumps(node)


@dataclass
class Shard:
    """A safetensors file in parts. `length`: the header's length as the file states it; None: the true one."""

    header: Object
    data: bytearray
    text: bytes | None = None
    length: int | None = None

    @classmethod
    def of(cls, raw: bytes) -> "Shard":
        start = 8 + int.from_bytes(raw[:8], "little")
        return cls(parse(raw[8:start]), bytearray(raw[start:]))

    def __bytes__(self) -> bytes:
        text = spell(self.header).encode() if self.text is None else self.text
        length = len(text) if self.length is None else self.length
        return length.to_bytes(8, "little") + text + bytes(self.data)

    def names(self) -> list[str]:
        return [name for name, _ in self.header if name != "__metadata__"]

    def is_sound(self, name: str) -> bool:
        entry = self.header.get(name)
        if not isinstance(entry, Object) or [key for key, _ in entry] != ["dtype", "shape", "data_offsets"]:
            return False
        (_, dtype), (_, shape), (_, span) = entry
        if not (isinstance(dtype, str) and dtype in DTYPES and isinstance(shape, list) and isinstance(span, list)):
            return False
        if len(span) != 2 or any(type(size) is not int or size < 0 for size in [*shape, *span]):
            return False
        return span[1] - span[0] == math.prod(shape) * DTYPES[dtype].itemsize and span[1] <= len(self.data)

    def span(self, name: str) -> tuple[int, int]:
        begin, end = self.header.get(name).get("data_offsets")
        return begin, end


@dataclass
class Draft:
    """A checkpoint that is being changed, and what has been done to it.

    Args:
        shards, documents: the files, of tensors and of JSON, by name.
        inner: whether a tensor of that name is one that the loader reads all of, and checks.
        did: in words.
        refused: whether no loader may take it.
        touched: tensors whose bytes may be others than before.
        reread: whether JSON changed that defines the tensors' meaning.
    """

    shards: dict[str, Shard]
    documents: dict[str, Any]
    inner: Callable[[str], bool]
    did: list[str] = field(default_factory=list)
    refused: bool = False
    touched: set[str] = field(default_factory=set)
    reread: bool = False
    raw: dict[str, Callable[[bytes], bytes | None]] = field(default_factory=dict)

    @classmethod
    def of(cls, files: Files, inner: Callable[[str], bool]) -> "Draft":
        shards = {name: Shard.of(raw) for name, raw in files.items() if name.endswith(".safetensors")}
        return cls(shards, {name: parse(raw) for name, raw in files.items() if name not in shards}, inner)

    def files(self) -> Files:
        """The files, without those that are gone."""
        made = {name: bytes(shard) for name, shard in self.shards.items()}
        made |= {name: spell(document).encode() for name, document in self.documents.items()}
        changed = {name: self.raw[name](raw) if name in self.raw else raw for name, raw in made.items()}
        return {name: raw for name, raw in changed.items() if raw is not None}

    def note(self, did: str, *touched: str, refused: bool = False) -> None:
        self.did.append(did)
        self.touched.update(touched)
        self.refused |= refused


def mutate(files: Files, inner: Callable[[str], bool], rng: random.Random) -> Draft:
    """One mutation of a checkpoint, or sometimes two; whether two must be rejected is not known."""
    draft = Draft.of(files, inner)
    kinds = [*_HEADER, *_BYTES, *_DOCUMENT, *_RAW]
    kinds += _INDEX if INDEX in draft.documents else []
    wanted = 1 + (rng.random() < 0.15)
    while len(draft.did) < wanted:
        with contextlib.suppress(IndexError):  # there is nothing here for that kind to choose from
            rng.choice(kinds)(draft, rng)
    draft.refused &= wanted == 1
    return draft


# Values that replace a value

_DEEP = Raw("[" * 20000 + "]" * 20000)
_JUNK: list[Any] = [None, True, False, 0, 1, -1, 3, 2**31, 2**63, 2**64, 1.5, 1e308, "", "x", "F32", "\x00", "é" * 300]
_JUNK += [[], [0], [0, 0], [[]], Object(), Object([["a", 1]]), Object([["dtype", "F32"]])]
_JUNK += [Raw("NaN"), Raw("-Infinity"), Raw("1e999"), Raw("9" * 5000), _DEEP, Raw(""), Raw("{,}"), Raw("01")]


def _junk(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(_JUNK))  # or else what is done to it would stay


def _instead(value: Any, rng: random.Random) -> Any:
    """Another value: near to it, or far from it."""
    near: list[Any] = []
    if isinstance(value, bool):
        near = [not value, int(value), str(value).lower()]
    elif isinstance(value, int | float):
        near = [value + 1, value - 1, value * 2, -value, value // 2, float(value), str(value), value * 10**9, [value]]
    elif isinstance(value, str):
        near = [value.upper(), value + " ", value[:-1], value.replace("_", "-"), value[::-1], [value], "re:" + value]
        near += ["re:(a+)+$", "re:(", "re:.*", ".*"]
    elif isinstance(value, Object):
        near = [Object(value[1:]), Object(value + copy.deepcopy(value[:1])), [pair[1] for pair in value]]
    elif isinstance(value, list):
        near = [
            value[1:],
            value + copy.deepcopy(value),
            value[::-1],
            [*value, None],
            [*value, 1],
            Object([["0", value]]),
        ]
    near = [other for other in near if spell(other) != spell(value)]
    return rng.choice(near) if near and rng.random() < 0.6 else _junk(rng)


# Headers


def _pick(draft: Draft, rng: random.Random, wanted: Callable[[str], bool] = lambda name: True) -> tuple[Shard, str]:
    """A tensor whose name is `wanted`. IndexError if there is none, as of all that choose."""
    return rng.choice([(shard, name) for shard in draft.shards.values() for name in shard.names() if wanted(name)])


def _entry(
    draft: Draft, rng: random.Random, wanted: Callable[[str], bool] = lambda name: True
) -> tuple[Shard, str, Object]:
    """One whose entry is still sound."""
    shard, name = _pick(draft, rng, wanted)
    if not shard.is_sound(name):
        raise IndexError(name)
    return shard, name, shard.header.get(name)


def _dtype(draft: Draft, rng: random.Random) -> None:
    _, name, entry = _entry(draft, rng)
    old = entry.get("dtype")
    new = rng.choice([dtype for dtype in DTYPES if dtype != old])
    entry.put("dtype", new)
    other_size = DTYPES[new].itemsize != DTYPES.get(old, np.dtype("u1")).itemsize
    draft.note(f"dtype {new} of {name}", name, refused=other_size or draft.inner(name))


def _shape(draft: Draft, rng: random.Random) -> None:
    _, name, entry = _entry(draft, rng)
    shape = entry.get("shape")
    size = math.prod(shape)
    ways: list[Any] = [[size], [1, *shape], [*shape, 1], shape[::-1], shape[1:], [*shape, 2], [*shape, 0]]
    ways += [
        [size // 2, 2],
        [-1, size],
        [-size],
        [float(s) for s in shape],
        [2**62, *shape],
        [True, *shape],
        [2**40] * 4,
    ]
    ways += [[*shape[:-1], shape[-1] + by] for by in (-1, 1, 16, 128) if shape]
    new = rng.choice([way for way in ways if repr(way) != repr(shape)])
    entry.put("shape", new)
    whole = all(type(s) is int and s >= 0 for s in new)
    # A single number may have any of several shapes, and scales of whole rows one of two.
    other = size > 1 and not (name.endswith("weight_scale") and {(*new,), (*shape,)} == {(size,), (size, 1)})
    refused = not whole or math.prod(new) != size or (draft.inner(name) and other)
    draft.note(f"shape {new} of {name}", name, refused=refused)


def _offsets(draft: Draft, rng: random.Random) -> None:
    _, name, entry = _entry(draft, rng)
    begin, end = entry.get("data_offsets")
    by = rng.choice([-(2**63), -64, -8, -1, 1, 2, 8, 64, 10**6, 2**63])
    ways: list[Any] = [[begin + by, end + by], [begin, end + by], [begin + by, end], [end, begin], [begin], [begin] * 2]
    ways += [[begin, end, end], [float(begin), float(end)], [str(begin), str(end)], [begin, True]]
    new = rng.choice(ways)
    entry.put("data_offsets", new)
    same = [type(n) for n in new] == [int, int] and new == [begin, end]
    draft.note(f"data_offsets {new} of {name}", name, refused=not same)


def _field(draft: Draft, rng: random.Random) -> None:
    _, name, entry = _entry(draft, rng)
    match rng.choice(["drop", "more", "junk", "twice", "key"]):
        case "drop":
            entry.pop(rng.randrange(3))
        case "more":
            entry.append([rng.choice(["strides", "", "Dtype", "__metadata__"]), _junk(rng)])
        case "junk":
            entry[rng.randrange(3)][1] = _junk(rng)
        case "twice":
            entry.append([*rng.choice(entry)])
        case "key":
            entry[rng.randrange(3)][0] += "s"
    draft.note(f"another entry of {name}: {spell(entry)[:200]}", name)


def _whole_entry(draft: Draft, rng: random.Random) -> None:
    shard, name = _pick(draft, rng)
    new = _junk(rng)
    shard.header.put(name, new)
    draft.note(f"{spell(new)[:50]} for {name}", name, refused=True)


def _drop_entry(draft: Draft, rng: random.Random) -> None:
    shard, name = _pick(draft, rng)
    shard.header[:] = [pair for pair in shard.header if pair[0] != name]
    draft.note(f"no entry of {name}", name, refused=True)


def _repeat_entry(draft: Draft, rng: random.Random) -> None:
    shard, name = _pick(draft, rng)
    shard.header.insert(rng.randrange(len(shard.header) + 1), [name, shard.header.get(name)])
    draft.note(f"{name} twice", name, refused=True)


_RENAMINGS = [
    ("gate_proj", "up_proj"),
    (".1.", "."),
    (".1.", ".01."),
    (".0.", ".1."),
    (".0.", ".-1."),
    (".0.", ".99999999999."),
    ("layers", "layer"),
    ("weight_", ""),
    ("_scale", "_scales"),
    ("weight", "bias"),
    ("_", "__"),
    ("model.", ""),
]


def _rename(draft: Draft, rng: random.Random) -> None:
    shard, name = _pick(draft, rng)
    new = (
        name.replace(*rng.choice(_RENAMINGS))
        if rng.random() < 0.8
        else rng.choice(["", "x", "__metadata__", name + "."])
    )
    if new == name:
        new += "\n"
    next(pair for pair in shard.header if pair[0] == name)[0] = new
    draft.note(f"{name} as {new}", name, new, refused=draft.inner(name))


def _exchange(draft: Draft, rng: random.Random) -> None:
    """Swaps two tensors of one size. No loader can detect that, but each must then have the other's bytes."""
    shard, name, entry = _entry(draft, rng)
    first = entry.get("data_offsets")
    others = [other for other in shard.names() if other != name and shard.is_sound(other)]
    spans = {other: shard.header.get(other).get("data_offsets") for other in others}
    other = rng.choice([other for other, span in spans.items() if span[1] - span[0] == first[1] - first[0]])
    entry.put("data_offsets", spans[other])
    shard.header.get(other).put("data_offsets", first)
    draft.note(f"{name} and {other} exchanged", name, other)


def _shuffle(draft: Draft, rng: random.Random) -> None:
    rng.shuffle(rng.choice([*draft.shards.values()]).header)
    draft.note("the header in another order")


def _metadata(draft: Draft, rng: random.Random) -> None:
    shard = rng.choice([*draft.shards.values()])
    shard.header[:] = [pair for pair in shard.header if pair[0] != "__metadata__"]
    new = rng.choice([None, Object([["format", "pt"]]), Object([["a", 1]]), _junk(rng), _junk(rng)])
    if new is not None:
        shard.header.append(["__metadata__", new])
    draft.note(f"metadata {spell(new)[:50]}")


def _header_text(draft: Draft, rng: random.Random) -> None:
    shard = rng.choice([*draft.shards.values()])
    text = spell(shard.header).encode()
    at = rng.randrange(len(text))
    ways = {
        "cut short": text[:at],
        "cut off in front": text[at + 1 :],
        "followed by more": text + rng.choice([b"{}", b"\x00", b"x", b"\xff"]),
        "in brackets": b"[" + text + b"]",
        "not UTF-8": text[:at] + b"\xff" + text[at + 1 :],
        "in UTF-16": text.decode().encode("utf-16"),
        "empty": b"",
        "null": b"null",
        "another object": b'{"a":1}',
    }
    way = rng.choice([*ways])
    shard.text = ways[way]
    draft.note(f"a header {way} at {at}", refused=True)


def _header_spaces(draft: Draft, rng: random.Random) -> None:
    shard = rng.choice([*draft.shards.values()])
    text = spell(shard.header).encode()
    shard.text = rng.choice([text + b" " * 9, b" " + text, b"\n" + text, text + b"\n", b"\xef\xbb\xbf" + text])
    draft.note("white space around the header")


def _header_byte(draft: Draft, rng: random.Random) -> None:
    shard = rng.choice([*draft.shards.values()])
    text = bytearray(spell(shard.header).encode())
    at = rng.randrange(len(text))
    old, text[at] = text[at], rng.choice([rng.randrange(256), *b'0123456789",:{}[]. eE-+'])
    shard.text = bytes(text)
    draft.note(f"byte {at} of the header {bytes([old])!r} as {text[at : at + 1]!r}", *shard.names())
    draft.touched.add("*")


def _header_length(draft: Draft, rng: random.Random) -> None:
    shard = rng.choice([*draft.shards.values()])
    length = len(spell(shard.header).encode())
    others = {0, 1, length - 1, length + 1, length + 8, 2 * length, 2**31, 2**40, 2**63, 2**64 - 1, 2**64 - 8} - {
        length
    }
    shard.length = rng.choice(sorted(others))
    draft.note(f"a header of {shard.length} bytes", refused=True)


_HEADER = [_dtype, _shape, _offsets, _field, _whole_entry, _drop_entry, _repeat_entry, _rename, _exchange, _shuffle]
_HEADER += [_metadata, _header_text, _header_spaces, _header_byte, _header_byte, _header_length]


# Bytes


def _drop_tensor(draft: Draft, rng: random.Random) -> None:
    """A tensor and its bytes go: the file that is left is sound."""
    shard, name, _ = _entry(draft, rng)
    _cut(shard, name)
    draft.note(f"no {name}", name, refused=draft.inner(name))


def _drop_expert(draft: Draft, rng: random.Random) -> None:
    """All of a layer's last expert goes: those that are left follow each other."""
    numbers = {}
    for name in (name for shard in draft.shards.values() for name in shard.names() if draft.inner(name)):
        if (match := re.fullmatch(r"(.*\.experts\.)(\d+)\..*", name)) is not None:
            numbers[match[1]] = max(numbers.get(match[1], 0), int(match[2]))
    layer = rng.choice([*numbers])
    gone = f"{layer}{numbers[layer]}."
    for shard in draft.shards.values():
        for name in dict.fromkeys(shard.names()):
            if name.startswith(gone) and shard.is_sound(name):
                _cut(shard, name)
    draft.note(f"no {gone}*", refused=True)


def _rename_experts(draft: Draft, rng: random.Random) -> None:
    """Gives all experts names that no loader knows."""
    other = rng.choice([".expert_list.", ".Experts.", ".experts_", "."])
    pairs = [pair for shard in draft.shards.values() for pair in shard.header if ".experts." in pair[0]]
    rng.choice(pairs)
    for pair in pairs:
        pair[0] = pair[0].replace(".experts.", other)
    draft.note(f"experts as {other}", refused=True)


def _cut(shard: Shard, name: str) -> None:
    begin, end = shard.span(name)
    del shard.data[begin:end]
    shard.header[:] = [pair for pair in shard.header if pair[0] != name]
    for other in filter(shard.is_sound, shard.names()):
        span = shard.span(other)
        shard.header.get(other).put("data_offsets", [n - (end - begin) if span[0] >= end else n for n in span])


def _add_tensor(draft: Draft, rng: random.Random) -> None:
    shard, name = _pick(draft, rng)
    new = rng.choice([f"{name}_more", f"{name.rpartition('.')[0]}.weight_zero_point", "more", f"{name}.more"])
    if new in shard.names():
        return
    raw = rng.randbytes(4 * rng.choice([0, 1, 3]))
    span = [len(shard.data), len(shard.data) + len(raw)]
    shard.header.append([new, Object([["dtype", "F32"], ["shape", [len(raw) // 4]], ["data_offsets", span]])])
    shard.data += raw
    draft.note(f"{new} besides", new, refused=draft.inner(new))


def _less_rows(draft: Draft, rng: random.Random) -> None:
    """A tensor of fewer rows in a sound file."""
    shard, name, entry = _entry(draft, rng)
    shape, (begin, end) = entry.get("shape"), shard.span(name)
    rows = rng.choice(range(shape[0]))
    row = (end - begin) // shape[0]
    dtype = entry.get("dtype")
    kept = bytes(shard.data[begin : begin + rows * row])
    _cut(shard, name)
    span = [len(shard.data), len(shard.data) + len(kept)]
    shard.header.append([name, Object([["dtype", dtype], ["shape", [rows, *shape[1:]]], ["data_offsets", span]])])
    shard.data += kept
    draft.note(f"{rows} rows of {name}", name, refused=draft.inner(name))


def _flip(draft: Draft, rng: random.Random) -> None:
    shard, name, _ = _entry(draft, rng)
    for _ in range(rng.choice([1, 1, 1, 5])):
        at = rng.choice(range(*shard.span(name)))
        shard.data[at] ^= rng.randrange(1, 256)
    draft.note(f"bytes of {name}", name)


_BAD_SCALES = {"NaN": math.nan, "zero": 0.0, "minus one": -1.0, "infinity": math.inf, "minus infinity": -math.inf}


def _scale(draft: Draft, rng: random.Random) -> None:
    """A scale that is none."""
    shard, name, entry = _entry(draft, rng, lambda name: "scale" in name and "norm" not in name and draft.inner(name))
    dtype, (begin, end) = DTYPES[entry.get("dtype")], shard.span(name)
    if dtype.kind in "iub" and dtype != np.uint8:  # that another mutation gave it, so it is none already
        raise IndexError(name)
    what = rng.choice([*_BAD_SCALES])
    if dtype == np.uint8 or (dtype.itemsize == 1 and what != "minus one"):  # of e8m0 all that is bad; e4m3 may be 0
        what, raw = "NaN", b"\xff"
    else:
        raw = np.array(_BAD_SCALES[what]).astype(dtype).tobytes()
    at = begin + len(raw) * rng.choice(range((end - begin) // len(raw)))
    shard.data[at : at + len(raw)] = raw
    draft.note(f"{what} in {name}", name, refused=True)


def _number(draft: Draft, rng: random.Random) -> None:
    """Groups and shapes, which are integers, of which another is wrong."""
    shard, name, entry = _entry(draft, rng, lambda name: name.endswith(("weight_shape", "weight_g_idx")))
    dtype, (begin, end) = DTYPES[entry.get("dtype")], shard.span(name)
    at = begin + dtype.itemsize * rng.choice(range((end - begin) // dtype.itemsize))
    (old,) = np.frombuffer(bytes(shard.data[at : at + dtype.itemsize]), dtype)
    new = rng.choice([int(old) ^ 1, int(old) ^ 2, 2**30, 2**30 + 1])
    shard.data[at : at + dtype.itemsize] = np.array(new).astype(dtype).tobytes()
    draft.note(f"{old} as {new} in {name}", name, refused=True)


_BYTES = [_drop_tensor, _drop_expert, _rename_experts, _add_tensor, _less_rows, _flip, _flip, _scale, _scale, _number]


# JSON


def _nodes(node: Any) -> list[tuple[Any, Any]]:
    """Every place of a value: what holds it, and where."""
    if isinstance(node, Object):
        return [place for pair in node for place in [(pair, 1), *_nodes(pair[1])]]
    if isinstance(node, list):
        return [place for i, value in enumerate(node) for place in [(node, i), *_nodes(value)]]
    return []


_QUANTIZATION = ("quantization_config", "quantization")  # of config.json, and of ModelOpt's own older file
_FREE = ("observer_kwargs", "producer")  # objects in which a tool may write what it likes


def _objects(node: Any) -> list[Object]:
    """The objects in a document that say something to a loader."""
    found = [node] if isinstance(node, Object) else []
    places = [place for place in _nodes(node) if place[0][0] not in _FREE]
    return [*found, *(o for holder, at in places if isinstance(o := holder[at], Object))]


def _aim(draft: Draft, rng: random.Random) -> Any:
    """A JSON document, or the part of it that defines how weights are quantized."""
    name = rng.choice([name for name in draft.documents if name != INDEX])
    document = draft.documents[name]
    parts = [value for key, value in document if key in _QUANTIZATION] if isinstance(document, Object) else []
    return rng.choice(parts) if parts and rng.random() < 0.75 else document


def _value(draft: Draft, rng: random.Random) -> None:
    holder, at = rng.choice(_nodes(_aim(draft, rng)))
    old = spell(holder[at])[:60]
    holder[at] = _instead(holder[at], rng)
    draft.note(f"{old} as {spell(holder[at])[:60]}")
    draft.reread = True


def _key(draft: Draft, rng: random.Random) -> None:
    aim = _aim(draft, rng)
    objects = [found for found in _objects(aim) if found]
    # All that a tool says of how it quantized has a meaning; a model's config says more than a loader of experts reads.
    known = (
        isinstance(aim, Object)
        and ("quant_method", "mxfp4") not in [(key, value) for key, value in aim]
        and aim not in draft.documents.values()
    )
    found = rng.choice(objects)
    pair = rng.choice(found)
    old, way = pair[0], rng.choice(["drop", "rename", "twice", "more", "borrow"])
    if way == "drop":
        found.remove(pair)
    elif way == "rename":
        pair[0] = rng.choice([pair[0] + "s", pair[0].upper(), "", pair[0].replace("_", "")]) + "_"
    elif way == "twice":
        found.append([pair[0], rng.choice([pair[1], 1])])
    elif way == "more":
        found.append([rng.choice(["extra", "actorder_", "scale", ""]), _junk(rng)])
    else:
        found.append(copy.deepcopy(rng.choice(rng.choice(objects))))
    any_name = re.fullmatch(r"group_\d+|model\.layers\.0\.mlp\.gate", old)
    named = way == "more" or (way == "rename" and not any_name)
    draft.note(f"{way} of {old}", refused=way == "twice" or (known and named))
    draft.reread = True


_DOCUMENT = [_value, _value, _value, _key, _key]


# Whole files


def _truncate(draft: Draft, rng: random.Random) -> None:
    file = rng.choice([*draft.shards, *draft.documents])

    def cut(raw: bytes) -> bytes:
        ends = [0, 7, 8, 9, len(raw) // 2, len(raw) - 1]
        return raw[: min(len(raw) - 1, rng.choice(ends) if rng.random() < 0.5 else rng.randrange(len(raw)))]

    draft.raw[file] = cut
    draft.note(f"{file} cut short", refused=True)


def _extend(draft: Draft, rng: random.Random) -> None:
    file = rng.choice([*draft.shards])
    more = rng.randbytes(rng.choice([1, 2, 8, 64, 4096]))
    place = rng.choice(["end", "data"])

    def extend(raw: bytes) -> bytes:
        at = len(raw) if place == "end" else min(len(raw), 8 + int.from_bytes(raw[:8], "little"))
        return raw[:at] + more + raw[at:]

    draft.raw[file] = extend
    draft.note(f"{len(more)} bytes more at the {place} of {file}", refused=True)


def _remove(draft: Draft, rng: random.Random) -> None:
    file = rng.choice([*draft.shards, *draft.documents])
    draft.raw[file] = lambda raw: None
    # Without an index, the numbers of shards show whether all are there.
    draft.note(f"no {file}", refused=file != INDEX)


def _garble(draft: Draft, rng: random.Random) -> None:
    file = rng.choice([*draft.documents])
    new, place = rng.choice([rng.randrange(256), *b'0123456789",:{}[]']), rng.random()

    def garble(raw: bytes) -> bytes:
        at = int(place * len(raw))
        return raw[:at] + bytes([new]) + raw[at + 1 :]

    draft.raw[file] = garble
    draft.note(f"{new:#x} at {place:.4f} of {file}")
    draft.reread = True


def _text(draft: Draft, rng: random.Random) -> None:
    file = rng.choice([*draft.documents])
    new = rng.choice([b"", b"null", b"[]", b"{}", b"1", b'"x"', b"{" * 50000, b"\xff\xfe", b"[" * 50000])
    draft.raw[file] = lambda raw: new
    nothing = file == CONFIG and QUANTIZATION in draft.documents and new == b"{}"
    draft.note(f"{new[:10]!r} for {file}", refused=not nothing)


_RAW = [_truncate, _extend, _remove, _garble, _text]


# The index


def _map(draft: Draft, rng: random.Random) -> None:
    """The place of one tensor."""
    document = draft.documents[INDEX]
    places = [value for key, value in document if key == "weight_map"] if isinstance(document, Object) else []
    if not places or not isinstance(places[0], Object):
        return
    pair = rng.choice(places[0])
    others = [name for name in draft.shards if name != pair[1]]
    match rng.choice(["drop", "rename", "move", "nowhere", "outside", "junk", "twice", "more"]):
        case "drop":
            places[0].remove(pair)
        case "rename":
            pair[0] += "_"
        case "move" if others:
            pair[1] = rng.choice(others)
        case "twice":
            places[0].append([*pair])
        case "more":
            places[0].append(["more", pair[1]])
        case "nowhere":
            pair[1] = rng.choice(["model-00009-of-00009.safetensors", "", ".", "..", "model", CONFIG])
        case "outside":
            pair[1] = rng.choice([f"../{pair[1]}", f"/{pair[1]}", f"./{pair[1]}", f"sub/{pair[1]}", "/dev/zero"])
        case _:
            pair[1] = rng.choice([None, True, 0, [], [pair[1]], Raw("NaN"), _DEEP])
    draft.note(f"the index says {spell(pair)[:120]}", refused=True)


def _index(draft: Draft, rng: random.Random) -> None:
    holder, at = rng.choice(_nodes(draft.documents[INDEX])[:6])
    holder[at] = _instead(holder[at], rng)
    draft.note(f"the index has {spell(holder[at])[:60]}")


_INDEX = [_map, _map, _index]


def read(directory: Path) -> Files:
    """A checkpoint's files: config.json and what holds tensors."""
    names = [CONFIG, INDEX, *(path.name for path in directory.glob("*.safetensors"))]
    return {name: (directory / name).read_bytes() for name in names if (directory / name).exists()}


def split(files: Files, parts: int) -> Files:
    """The same tensors in numbered shards with an index, for a checkpoint of one file."""
    (single,) = (name for name in files if name.endswith(".safetensors"))
    whole = Shard.of(files[single])
    names = whole.names()
    made, places = {name: raw for name, raw in files.items() if name != single}, Object()
    for part in range(parts):
        file = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        header, data = Object(), bytearray()
        for name in names[part::parts]:
            begin, end = whole.span(name)
            entry = whole.header.get(name)
            span = [len(data), len(data) + end - begin]
            header.append([name, Object([*entry[:-1], ["data_offsets", span]])])
            data += whole.data[begin:end]
            places.append([name, file])
        made[file] = bytes(Shard(header, data))
    made[INDEX] = spell(
        Object([["metadata", Object([["total_size", len(whole.data)]])], ["weight_map", places]])
    ).encode()
    return made
