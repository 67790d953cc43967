"""What a plan must move, and how fast memory could move it."""

from dataclasses import dataclass

from reference import NUM_HEADS, QK_HEAD_DIM, V_HEAD_DIM

# 576 values a token; mxfp4 has half a byte a value and one scale byte for 32 of them.
BYTES_PER_TOKEN = {"bf16": 1152, "fp8": 576, "mxfp4": 306}


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second of a device's memory, and where they are from. names: parts of the name that devices report."""

    device: str
    bytes_per_second: float
    source: str
    names: tuple[str, ...]


BANDWIDTHS = (
    Bandwidth("MI355X", 8.0e12, "datasheet", ("MI355X", "gfx950")),
    Bandwidth("H200", 4.3e12, "measured here, a large copy; the datasheet says 4.8", ("H200",)),
)


@dataclass(frozen=True)
class Traffic:
    """Bytes of one call. Each is counted once, as if nothing stayed in a cache and nothing was read twice.

    q_cast: the fp8 copy of q, written and read. partials: of split sequences, written and read; None if aiter picks the
    number of splits.
    """

    cache: int
    q: int
    output: int
    q_cast: int
    partials: int | None

    @property
    def compulsory(self) -> int:
        """What no kernel that reads this cache format can do without; the rest may stay in the last-level cache."""
        return self.cache + self.q + self.output

    @property
    def total(self) -> int:
        return self.compulsory + self.q_cast + (self.partials or 0)


def traffic(
    batch_size: int,
    kv_seq_len: int,
    cache: str,
    *,
    casts_q: bool = False,
    num_splits: int | None = 1,
    page_size: int = 1,
    partial_bytes: int = 4,
) -> Traffic:
    """The bytes of a call that reads `cache` ("bf16", "fp8" or "mxfp4") in `num_splits` parts a sequence.

    page_size: above 1 only the first token of each page is read. partial_bytes: of a value between the kernels; the
    log-sum-exp that goes with each head's values has 4.
    """
    q_values = batch_size * NUM_HEADS * QK_HEAD_DIM
    outputs = batch_size * NUM_HEADS * V_HEAD_DIM
    part = batch_size * NUM_HEADS * (V_HEAD_DIM * partial_bytes + 4)
    return Traffic(
        cache=batch_size * (kv_seq_len // page_size) * BYTES_PER_TOKEN[cache],
        q=q_values * 2,
        output=outputs * 2,
        q_cast=q_values * 2 if casts_q else 0,
        partials=None if num_splits is None else part * num_splits * 2 if num_splits > 1 else 0,
    )


def bandwidth_of(device_name: str) -> Bandwidth | None:
    """The entry for a device by its name, None for one that is not known."""
    return next((b for b in BANDWIDTHS if any(name in device_name for name in b.names)), None)


def nanoseconds(num_bytes: int, bandwidth: Bandwidth) -> float:
    """The time the memory needs for that many bytes."""
    return num_bytes / bandwidth.bytes_per_second * 1e9
