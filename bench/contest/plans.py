"""Fused plans as text: spaces of them on the command line, one in a few words, one as Python source.

A space is what is written for a plan, with alternatives between slashes: "fp8,splits=8/16,block=64,merge=last/kernel".
The names are the cache format, `splits`, and the fields of submission.Tile; what is not named has Tile's default, and
splits are then tried automatically.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bench.basics import UserError
from submission import FUSED_PRECISIONS, MAX_FUSED_SPLITS, Plan, Tile

AUTO = "auto"
_FIELDS = {field.name: field for field in dataclasses.fields(Tile) if field.name != "cache"}
_WAVES = 8  # as many programs a processor are tried at the most


@dataclass(frozen=True)
class Space:
    """text: as written. tiles: all combinations of its alternatives. splits: numbers, or AUTO."""

    text: str
    tiles: tuple[Tile, ...]
    splits: tuple[int | str, ...]

    def plans(self, batch_size: int, kv_seq_len: int, processors: int) -> list[Plan]:
        """For a shape, on a GPU of so many processors. With one split, which nobody merges, one `merge` is enough."""
        found: dict[object, Plan] = {}
        for tile in self.tiles:
            for splits in self._numbers(batch_size, kv_seq_len, processors, tile.block):
                plan = Plan("fused", num_splits=splits, tile=tile)
                found.setdefault(dataclasses.replace(plan, tile=_unmerged(tile)) if splits == 1 else plan, plan)
        return list(found.values())

    def _numbers(self, batch_size: int, kv_seq_len: int, processors: int, block: int) -> Iterator[int]:
        for splits in self.splits:
            if splits == AUTO:
                yield from _automatic_splits(batch_size, kv_seq_len, processors, block)
            else:
                yield splits


def _unmerged(tile: Tile) -> Tile:
    return dataclasses.replace(tile, merge=_FIELDS["merge"].default)


def _automatic_splits(batch_size: int, kv_seq_len: int, processors: int, block: int) -> list[int]:
    """Powers of two, and what fills the machine once, twice and three times; a tile or more each."""
    most = max(1, min(-(-kv_seq_len // block), MAX_FUSED_SPLITS, _WAVES * processors // batch_size))
    powers = [1 << i for i in range(most.bit_length())]
    waves = [wave * processors // batch_size for wave in (1, 2, 3)]
    return sorted({splits for splits in (*powers, *waves) if 1 <= splits <= most})


def parse_space(text: str) -> Space:
    """Raises UserError for text of another form."""
    caches, *settings = (part.strip() for part in text.split(","))
    choices: dict[str, list] = {"cache": _caches(text, caches), "splits": [AUTO]}
    for i, setting in enumerate(settings):
        name, equals, values = (part.strip() for part in setting.partition("="))
        if not equals or name not in ("splits", *_FIELDS) or any(s.startswith(f"{name}=") for s in settings[:i]):
            raise UserError(
                f"--plans {text!r}: {setting!r} is not NAME=VALUE, once a name, with a NAME of splits, "
                f"{', '.join(_FIELDS)}; such as fp8,splits=8/16,merge=last/kernel"
            )
        choices[name] = [_value(text, name, value) for value in values.split("/")]
    splits = tuple(choices.pop("splits"))
    combinations = itertools.product(*choices.values())
    return Space(text, tuple(Tile(**dict(zip(choices, values, strict=True))) for values in combinations), splits)


def _caches(text: str, values: str) -> list[str]:
    for value in (found := values.split("/")):
        if value not in FUSED_PRECISIONS:
            raise UserError(
                f"--plans {text!r}: the cache format comes first, one of {', '.join(FUSED_PRECISIONS)}; got {value!r}"
            )
    return found


def _value(text: str, name: str, value: str) -> int | str:
    """A number of splits or AUTO; else in the type of the field's default."""
    if name == "splits":
        return value if value == AUTO else _number(text, name, value, least=1)
    return _number(text, name, value) if isinstance(_FIELDS[name].default, int) else value


def _number(text: str, name: str, value: str, least: int = 0) -> int:
    if not value.isascii() or not value.isdigit() or int(value) < least:
        raise UserError(f"--plans {text!r}: {name} must be a number of {least} or more, got {value!r}")
    return int(value)


def cache_of(kv_data: dict, cache: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache format's values and scale, as fused_launches takes them."""
    values = kv_data[cache]
    return (values, torch.ones(1, device=values.device)) if cache == "bf16" else values


def spec_of(plan: Plan) -> str:
    """A fused plan as --plans takes it: "fp8,splits=16,block=64,warps=4,stages=3,merge=last"."""
    named = [f"{name}={getattr(plan.tile, name)}" for name in _FIELDS]
    return ",".join([plan.tile.cache, f"splits={plan.num_splits}", *named])


def source_of(plan: Plan) -> str:
    """A fused plan as it stands in a table of submission.py."""
    changed = [
        f"{name}={getattr(plan.tile, name)!r}" for name, f in _FIELDS.items() if getattr(plan.tile, name) != f.default
    ]
    tile = ", ".join([repr(plan.tile.cache), *changed]).replace("'", '"')
    return f'Plan("{plan.runner}", num_splits={plan.num_splits}, tile=Tile({tile}))'
