"""What a split makes of a call: each device's part of it, the exchange and why no other, and bytes between devices."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax.numpy as jnp
from rich.text import Text

from jmx.experts.sharded import shard_size
from jmx.meshes import Names
from jmx.numerics.formats import FORMATS
from jmx.pallas.routing import call as routing_kernel
from jmx.parallel.exchange import Call
from jmx.parallel.exchanges import EXCHANGES, choose
from jmx.parallel.needed import logits_name_ranks
from jmx.parallel.split import Split, exchange_call
from jmx.routing import Method
from jmx.selection.environment import Environment
from jmx.selection.problem import Problem, weight_bytes
from jmx.util.tables import FoldingTable, words


@dataclass(frozen=True)
class Division:
    """A call that a mesh divides. Created by `of`.

    Args:
        split: how.
        sizes: the devices along each mesh axis that it names.
        num_tokens: those of one device.
        local: what a device computes if all tokens that are exchanged with it come to it; its experts only.
        call: what is static of the exchange; None: no device has other experts and other tokens than another one.
        chosen: name of the exchange that runs; None: there is none, or the requested one cannot run.
        trail: each exchange's name, summary and reason why it cannot run (None: it can).
        bytes_before, bytes_after: that a device sends to others before its experts compute, with weights, and after.
        gathered: mesh axes along which weights are gathered at each call.
        bytes_gathered: of weights that a device gets from others at each call, and sends to them.
        slots: those of the experts' placement, if they have one.
        routes_all: whether each device routes all tokens that come to it, by a kernel that groups its experts' rows.
    """

    split: Split
    sizes: Mapping[str, int]
    num_tokens: int
    local: Problem
    call: Call | None
    chosen: str | None
    trail: tuple[tuple[str, str, str | None], ...]
    bytes_before: int
    bytes_after: int
    gathered: Names = ()
    bytes_gathered: int = 0
    slots: int | None = None
    routes_all: bool = False

    @classmethod
    def of(
        cls,
        problem: Problem,
        split: Split,
        mesh: Mapping[str, int],
        num_slots: int | None = None,
        platform: str | None = None,
    ) -> "Division":
        """How `split` divides a call.

        Args:
            problem: the call, of all devices.
            mesh: the sizes of the mesh's axes, by name.
            num_slots: slots of the experts' placement, if they have one.
            platform: of devices that are not here, as in `Call`.

        Raises:
            ValueError: a symbolic number of tokens, or sizes that the mesh does not divide.
        """
        sizes = {name: size for name, size in mesh.items() if name in split.all_names}
        devices = {field: prod(sizes[name] for name in split.names(field)) for field in ("expert", "tokens")}
        experts = problem.num_experts if num_slots is None else num_slots
        num_tokens = _part("tokens", problem.num_tokens, devices["tokens"], "tokens", split)
        local_experts = _part("expert", experts, devices["expert"], "experts", split)
        ranks = prod(sizes[name] for name in split.exchanged)
        format = FORMATS[problem.format]
        shards = prod(sizes[name] for name in split.names("intermediate"))
        intermediate = problem.intermediate_size
        if shards > 1:
            intermediate = shard_size(intermediate, format, problem.input_format, shards)
        parts: dict[str, Any] = {"num_tokens": num_tokens * ranks, "num_experts": local_experts}
        parts |= {"intermediate_size": intermediate, "num_routed": experts if local_experts < experts else None}
        itemsize = jnp.dtype(problem.dtype).itemsize
        call, before, after, chosen, trail = None, 0, 0, None, ()
        if ranks > 1:
            call = exchange_call(
                split,
                sizes,
                num_tokens=num_tokens,
                top_k=problem.top_k,
                hidden_size=problem.hidden_size,
                itemsize=itemsize,
                experts_per_rank=local_experts,
                input_format=None if problem.on_input else problem.input_format,
                platform=platform,
            )
            trail = _trail(call)
            chosen = _chosen(call, split)
            before, after = (0, 0) if chosen is None else EXCHANGES[chosen].bytes_sent(call)
        summed = prod(sizes[name] for name in split.summed)
        after += 2 * (summed - 1) * num_tokens * problem.hidden_size * itemsize // summed  # a ring's
        local = replace(problem, **parts)
        gathered = tuple(name for name in split.names("hidden") if sizes[name] > 1)
        devices_of_weights = prod(sizes[name] for name in gathered)
        got = round(weight_bytes(local, local_experts) * (devices_of_weights - 1) / devices_of_weights)
        before += got
        return cls(split, sizes, num_tokens, local, call, chosen, trail, before, after, gathered, got, num_slots)

    def of_logits(self, routed: Any, environment: Environment, itemsize: int = 4) -> "Division":
        """The same call with router logits, which devices exchange instead of their routing if one kernel routes all.

        Args:
            routed: their method; any other value: the call gets a routing.
            environment: of the devices.
            itemsize: bytes of a logit.
        """
        its, split = self.local, self.split
        if not isinstance(routed, Method) or split.intermediate or self.slots or not split.sends_logits:
            return self
        if self.expert_devices == 1:
            return self
        biases = {False, routed.takes_bias}  # which is not known here
        for biased in biases:
            if not routing_kernel.applies(routed, biased, its.num_tokens, its.num_choices, environment):
                return self
        if self.call is None:
            return replace(self, routes_all=True)
        known = all(logits_name_ranks(routed, biased, its.num_choices, itemsize) for biased in biases)
        call = replace(self.call, logit_bytes=its.num_choices * itemsize, ranks_known=known)
        chosen = _chosen(call, split)
        if self.chosen is None or chosen is None:
            return self
        before, plain = (EXCHANGES[name].bytes_sent(of)[0] for name, of in ((chosen, call), (self.chosen, self.call)))
        sent = self.bytes_before + before - plain
        return replace(self, call=call, chosen=chosen, trail=_trail(call), bytes_before=sent, routes_all=True)

    @property
    def expert_devices(self) -> int:
        """Devices over which the experts are divided."""
        return prod(self.sizes[name] for name in self.split.names("expert"))

    @property
    def mesh(self) -> str:
        """The mesh axes and their sizes, as `--mesh` has them."""
        return ",".join(f"{name}={size}" for name, size in self.sizes.items())

    @property
    def _wire_name(self) -> str:
        """What x is sent in: a format, or its own dtype."""
        wire = None if self.call is None else self.call.wire
        return str(self.local.dtype) if wire is None else wire.format.name

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        exchanges = [{"name": name, "chosen": name == self.chosen, "reason": no} for name, _, no in self.trail]
        return {
            "mesh": dict(self.sizes),
            "expert": self.split.names("expert"),
            "tokens": self.split.names("tokens"),
            "intermediate": self.split.names("intermediate"),
            "gathered": self.gathered,
            "bytes_gathered": self.bytes_gathered,
            "tokens_per_device": self.num_tokens,
            "experts_per_device": self.local.num_experts,
            "exchange": self.chosen,
            "exchanges": exchanges,
            "chunks": self.split.chunks,
            "wire": None if self.call is None else self._wire_name,
            "bytes_before_experts": self.bytes_before,
            "bytes_after_experts": self.bytes_after,
            "routes_all": self.routes_all,
        }

    def lines(self) -> list[Any]:
        """To print: the mesh, and a table of exchanges."""
        whats = ("expert", "experts"), ("intermediate", "their intermediate axis"), ("tokens", "tokens")
        named = [f"{what} over {' and '.join(names)}" for field, what in whats if (names := self.split.names(field))]
        head = f"mesh {self.mesh}: {', '.join(named) or 'nothing is divided'}"
        local = self.local
        parts = f"each device: {self.num_tokens} tokens, {local.num_experts} experts, I={local.intermediate_size}"
        lines: list[Any] = [Text(head), Text(parts)]
        if self.gathered:
            bytes = f"{self.bytes_gathered / 1e6:.3g} MB a device"
            lines.append(
                Text(f"weights are gathered over {' and '.join(self.gathered)} at each call, {bytes}", "yellow")
            )
        if self.routes_all:
            sent = "" if self.call is None else ", whose logits are exchanged,"
            does = f"routes {local.num_tokens} tokens{sent} and groups its experts' rows"
            lines.append(Text(f"each device {does} by one kernel, jmx_route"))
        if self.call is None:
            summed = f", and results are added over {' and '.join(self.split.summed)}" if self.split.summed else ""
            lines.append(Text(f"no exchange: devices with other experts have the same tokens{summed}"))
            return lines
        table = FoldingTable(words("exchange", "", "why"))
        for name, summary, no in self.trail:
            if no is not None:
                table.add_row(name, Text("no", "red"), no)
            elif name == self.chosen:
                table.add_row(Text(name, "bold"), Text("chosen", "bold green"), summary)
            else:
                table.add_row(name, "can", summary)
        lines.append(table)
        if self.split.chunks > 1:
            lines.append(Text(f"tokens of a device go in {self.split.chunks} chunks, and each reads the weights"))
        if (wire := self.call.wire) is not None:
            plain = self.call.hidden_size * self.call.itemsize
            lines.append(Text(f"x goes as {self._wire_name}, {wire.token_bytes} of {plain} bytes a token"))
        else:
            lines.append(Text(f"x goes in {self._wire_name}"))
        if self.chosen is None:
            rule = "must be one that can run this call"
            lines.append(Text(f"a call raises ValueError: `exchange` (={self.split.exchange!r}) {rule}", "red"))
        return lines


def _part(field: str, size: int | None, devices: int, what: str, split: Split) -> int:
    if size is None:
        raise ValueError("`num_tokens` (=None) must be a number: what is sent between devices depends on it")
    if size % devices:
        given = getattr(split, field)
        raise ValueError(f"`{field}` (={given!r}) must divide the {size} {what} evenly, over {devices} devices")
    return size // devices


def _trail(call: Call) -> tuple[tuple[str, str, str | None], ...]:
    return tuple((name, its.summary, its.supports(call)) for name, its in EXCHANGES.items())


def _chosen(call: Call, split: Split) -> str | None:
    try:
        return choose(call, split.exchange).exchange.name
    except ValueError:  # the trail has the reason
        return None
