"""Plans of our own kernels as text: spaces of them on the command line, one in a few words, one as Python source.

A space is written as a plan is, with slashes between alternatives: "fp8,splits=8/16,block=64,merge=last/kernel". First
comes the cache format; the names are `runner` ("fused", or "wgmma" on sm_90), `splits`, and the fields of
submission.Tile. What is not named has its default: "fused", automatic splits, and the runner's own tile.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import sm_90
from bench.basics import UserError
from submission import FUSED_PRECISIONS, MAX_FUSED_SPLITS, RUNNERS, FusedRunner, Plan, Tile, runner_of

AUTO = "auto"
_DEFAULT_RUNNER = "fused"
_FIELDS = {field.name: field for field in dataclasses.fields(Tile) if field.name != "cache"}
_WAVES = 8  # the most programs per processor that are tried


def is_fused(plan: Plan) -> bool:
    """Whether our own kernels run it, so that its launches are known."""
    return isinstance(runner_of(plan), FusedRunner)


@dataclass(frozen=True)
class Space:
    """text: as written. variants: all combinations of its runners and tiles. splits: numbers, or AUTO."""

    text: str
    variants: tuple[tuple[str, Tile], ...]
    splits: tuple[int | str, ...]

    def plans(self, batch_size: int, kv_seq_len: int, processors: int) -> list[Plan]:
        """For a shape, on a GPU of that many processors. One split is not merged, so one `merge` is tried with it."""
        found: dict[object, Plan] = {}
        for runner, tile in self.variants:
            for splits in self._numbers(batch_size, kv_seq_len, processors, tile.block):
                plan = Plan(runner, num_splits=splits, tile=tile)
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
    """Powers of two, and the numbers that fill the machine once, twice and three times; at least one tile per split."""
    most = max(1, min(-(-kv_seq_len // block), MAX_FUSED_SPLITS, _WAVES * processors // batch_size))
    powers = [1 << i for i in range(most.bit_length())]
    waves = [wave * processors // batch_size for wave in (1, 2, 3)]
    return sorted({splits for splits in (*powers, *waves) if 1 <= splits <= most})


def parse_space(text: str) -> Space:
    """Raises UserError for text of another form, and for values that none of its runners takes."""
    sm_90.install()
    caches, *settings = (part.strip() for part in text.split(","))
    choices: dict[str, list] = {"cache": _caches(text, caches)}
    for i, setting in enumerate(settings):
        name, equals, values = (part.strip() for part in setting.partition("="))
        known = ("runner", "splits", *_FIELDS)
        if not equals or name not in known or any(s.startswith(f"{name}=") for s in settings[:i]):
            raise UserError(
                f"--plans {text!r}: {setting!r} is not NAME=VALUE, each name once, with a NAME of {', '.join(known)}; "
                "such as fp8,splits=8/16,merge=last/kernel"
            )
        choices[name] = [_value(text, name, value) for value in values.split("/")]
    splits = tuple(choices.pop("splits", [AUTO]))
    runners = choices.pop("runner", [_DEFAULT_RUNNER])
    return Space(text, tuple((name, tile) for name in runners for tile in _tiles(text, name, choices)), splits)


def _tiles(text: str, name: str, choices: Mapping[str, list]) -> Iterator[Tile]:
    """All combinations of what is chosen, as the runner `name` takes them."""
    allowed = RUNNERS[name].choices
    for field, values in choices.items():
        wrong = [value for value in values if value not in allowed[field]]
        if wrong:
            raise UserError(
                f"--plans {text!r}: {field} must be one of {', '.join(map(str, allowed[field]))} for the runner "
                f"{name}, got {wrong[0]!r}"
            )
    # A default that this runner does not take is replaced by its first choice.
    defaults = {
        field: (f.default if f.default in allowed[field] else allowed[field][0]) for field, f in _FIELDS.items()
    }
    for values in itertools.product(*choices.values()):
        yield Tile(**defaults | dict(zip(choices, values, strict=True)))


def _caches(text: str, values: str) -> list[str]:
    for value in (found := values.split("/")):
        if value not in FUSED_PRECISIONS:
            raise UserError(
                f"--plans {text!r}: the cache format comes first, one of {', '.join(FUSED_PRECISIONS)}; got {value!r}"
            )
    return found


def _value(text: str, name: str, value: str) -> int | str:
    """A number of splits or AUTO; one of our own runners; or a value of the type that the field's default has."""
    if name == "splits":
        return value if value == AUTO else _number(text, name, value, least=1)
    if name == "runner":
        known = [key for key, runner in RUNNERS.items() if isinstance(runner, FusedRunner)]
        if value not in known:
            raise UserError(f"--plans {text!r}: runner must be one of {', '.join(known)}, got {value!r}")
        return value
    return _number(text, name, value) if isinstance(_FIELDS[name].default, int) else value


def _number(text: str, name: str, value: str, least: int = 0) -> int:
    if not value.isascii() or not value.isdigit() or int(value) < least:
        raise UserError(f"--plans {text!r}: {name} must be a number of {least} or more, got {value!r}")
    return int(value)


def spec_of(plan: Plan) -> str:
    """A plan as --plans takes it: "fp8,splits=16,block=64,warps=4,stages=3,merge=last"."""
    runner = [] if plan.runner == _DEFAULT_RUNNER else [f"runner={plan.runner}"]
    named = [f"{name}={getattr(plan.tile, name)}" for name in _FIELDS]
    return ",".join([plan.tile.cache, *runner, f"splits={plan.num_splits}", *named])


def source_of(plan: Plan) -> str:
    """A plan as it stands in a table."""
    changed = [
        f"{name}={getattr(plan.tile, name)!r}" for name, f in _FIELDS.items() if getattr(plan.tile, name) != f.default
    ]
    tile = ", ".join([repr(plan.tile.cache), *changed]).replace("'", '"')
    return f'Plan("{plan.runner}", num_splits={plan.num_splits}, tile=Tile({tile}))'
