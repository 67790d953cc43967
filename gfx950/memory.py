"""Memory as a kernel sees it: global buffers with guard zones between them, LDS, and scratch.

Every access is byte-wise and vectorised over the lanes; beside the data stand shadows that say which bytes were ever
written, touched, and by which wave since the last barrier.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from gfx950.findings import (
    MISALIGNED,
    OUT_OF_BOUNDS,
    RACE,
    UNINITIALISED,
    CodeObjectError,
    Findings,
    KernelFaultError,
)

FIRST_ADDRESS = 0x7E00_0000_0000  # high, so that code that drops upper halves of an address is found out
GUARD = 1 << 24  # bytes between two buffers
POISON = 0xAB  # what unwritten and out-of-bounds bytes hold
# Triton gives each buffer instruction this number of records, whatever the tensor's size, and to lanes that its mask
# leaves out the first offset beyond any size: the range check masks those, and protects nothing else.
NO_SIZE, MASKED_OFFSET = 2**31 - 2, 2**31
LDS_BANKS = 64  # of 4 bytes each
MAX_WAVES = 16  # of a workgroup: 1024 lanes


@dataclass(frozen=True)
class Uninitialised:
    """An argument whose bytes count as never written: to read one before the kernel writes it is a finding."""

    tensor: object


@dataclass(frozen=True)
class Unaligned:
    """An argument at an address that is a multiple of its element size only, and compiled as such."""

    tensor: object


def unwrap(argument: object) -> object:
    """The tensor or number inside Uninitialised and Unaligned."""
    while isinstance(argument, (Uninitialised, Unaligned)):
        argument = argument.tensor
    return argument


def is_marked(argument: object, mark: type) -> bool:
    while isinstance(argument, (Uninitialised, Unaligned)):
        if isinstance(argument, mark):
            return True
        argument = argument.tensor
    return False


def is_tensor(argument: object) -> bool:
    return isinstance(argument, np.ndarray) or type(argument).__module__.split(".")[0] == "torch"


def storage_bytes(tensor: object, name: str) -> np.ndarray:
    """The bytes that a torch tensor on the CPU or a numpy array spans, shared with it.

    A strided view spans everything from its first element to its last. Raises CodeObjectError for a tensor elsewhere,
    a read-only array, or a negative stride.
    """
    if isinstance(tensor, np.ndarray):
        if not tensor.flags.writeable:
            raise CodeObjectError(f"{name} is a read-only array; pass a copy of it")
        if min(tensor.strides, default=1) < 0:
            raise CodeObjectError(f"{name} has a negative stride; pass a contiguous copy")
        if tensor.size == 0:
            return np.empty(0, np.uint8)
        extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True)) // tensor.itemsize + 1
        return np.lib.stride_tricks.as_strided(tensor, (extent,), (tensor.itemsize,)).view(np.uint8)
    if tensor.device.type != "cpu":
        raise CodeObjectError(f"{name} is on {tensor.device}; this machine's memory is the CPU's: pass tensor.cpu()")
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return np.empty(0, np.uint8)
    extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    import torch

    flat = torch.as_strided(tensor, (extent,), (1,))
    return flat.view(torch.uint8).numpy()


@dataclass(frozen=True)
class Span:
    """Bytes of a storage: of several arguments' memory where they overlap, else of one argument's."""

    storage: int
    offset: int


def spans_of(arrays: Sequence[np.ndarray]) -> list[Span]:
    """For each array of bytes the storage it lies in; arrays that overlap share one."""
    ranges = [(array.ctypes.data, array.ctypes.data + array.size) for array in arrays]
    spans = [Span(0, 0)] * len(arrays)
    storage, start, end = -1, 0, 0
    for i in sorted(range(len(arrays)), key=ranges.__getitem__):
        first, last = ranges[i]
        if storage < 0 or first >= end:
            storage, start, end = storage + 1, first, last
        spans[i] = Span(storage, first - start)
        end = max(end, last)
    return spans


def storage_maps(spans: Sequence[Span], maps: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The union of the arguments' bool maps of bytes, for each storage."""
    sizes: dict[int, int] = {}
    for span, marked in zip(spans, maps, strict=True):
        sizes[span.storage] = max(sizes.get(span.storage, 0), span.offset + marked.size)
    unions = [np.zeros(sizes[storage], bool) for storage in sorted(sizes)]
    for span, marked in zip(spans, maps, strict=True):
        unions[span.storage][span.offset : span.offset + marked.size] |= marked
    return unions


@dataclass
class Buffer:
    """A span of global memory. `written` is None where every byte counts as written; the maps are by byte.

    span: which bytes of the arguments' storages it is, None for what is no argument. forbidden: says what it means
    to touch it, where that ends the run.
    """

    name: str
    base: int
    data: np.ndarray
    written: np.ndarray | None = None
    span: Span | None = None
    readonly: bool = False
    forbidden: Callable[[], str] | None = None
    bytes_read: int = 0
    bytes_written: int = 0
    read_map: np.ndarray = field(init=False)
    write_map: np.ndarray = field(init=False)

    def __post_init__(self):
        self.read_map = np.zeros(self.data.size, bool)
        self.write_map = np.zeros(self.data.size, bool)

    @property
    def end(self) -> int:
        return self.base + self.data.size


class GlobalMemory:
    """The buffers a kernel was given, by address; anything else is out of bounds."""

    def __init__(self, findings: Findings):
        self.buffers: list[Buffer] = []
        self._findings = findings
        self._next = FIRST_ADDRESS

    def add(self, name: str, data: np.ndarray, *, offset: int = 0, **options) -> Buffer:
        """Map bytes as a buffer at a multiple of 256 plus `offset`."""
        buffer = Buffer(name, self._next + offset, data, **options)
        self.buffers.append(buffer)
        self._next += -(-(data.size + offset + GUARD) // GUARD) * GUARD + GUARD
        return buffer

    def load(self, addresses: np.ndarray, size: int, lanes: np.ndarray, align: int) -> np.ndarray:
        """Read `size` bytes at each address (int64): uint8, (len(addresses), size). `lanes` names them in findings."""
        out = np.full((addresses.size, size), POISON, np.uint8)
        for buffer, chosen, places in self._pieces(addresses, size, lanes, align, "read"):
            out[chosen] = buffer.data[places]
            if buffer.written is not None and not (known := buffer.written[places]).all():
                lane = np.nonzero(~known.all(axis=1))[0][0]
                self._report(UNINITIALISED, "reads bytes never written", buffer, addresses, lanes, chosen, lane)
            if buffer.span is not None:
                buffer.bytes_read += places.size
                buffer.read_map[places] = True
        return out

    def store(self, addresses: np.ndarray, data: np.ndarray, lanes: np.ndarray, align: int) -> None:
        """Write data, uint8 (len(addresses), size); of lanes with the same address the last one stays."""
        for buffer, chosen, places in self._pieces(addresses, data.shape[1], lanes, align, "write"):
            if buffer.readonly:
                self._report(OUT_OF_BOUNDS, "writes to read-only memory", buffer, addresses, lanes, chosen, 0)
                continue
            buffer.data[places] = data[chosen]
            if buffer.written is not None:
                buffer.written[places] = True
            buffer.bytes_written += places.size
            buffer.write_map[places] = True

    def _pieces(self, addresses: np.ndarray, size: int, lanes: np.ndarray, align: int, what: str):
        """For each buffer hit: the buffer, which accesses fall in it, and their byte places (n, size)."""
        if addresses.size == 0:
            return
        steps = np.arange(size)
        low, high = int(addresses.min()), int(addresses.max())
        if align > 1 and (addresses & (align - 1)).any():
            lane = np.nonzero(addresses & (align - 1))[0][0]
            self._findings.report(
                MISALIGNED,
                f"{what}s {size} bytes at an address that is no multiple of {align}",
                int(lanes[lane]),
                int(addresses[lane]),
            )
        missed = np.ones(addresses.size, bool)
        for buffer in self.buffers:
            if high < buffer.base or low >= buffer.end:
                continue
            if buffer.forbidden:
                raise KernelFaultError(buffer.forbidden())
            if low >= buffer.base and high + size <= buffer.end:
                yield buffer, slice(None), (addresses - buffer.base)[:, None] + steps
                return
            inside = (addresses >= buffer.base) & (addresses + size <= buffer.end)
            if inside.any():
                missed &= ~inside
                yield buffer, inside, (addresses[inside] - buffer.base)[:, None] + steps
        if missed.any():
            lane = np.nonzero(missed)[0][0]
            address = int(addresses[lane])
            self._findings.report(
                OUT_OF_BOUNDS, f"{what}s {size} bytes {self.relative(address)}", int(lanes[lane]), address
            )

    def report_dropped(
        self, verb: str, base: int, offsets: np.ndarray, size: int, lanes: np.ndarray, dropped: np.ndarray
    ) -> None:
        """Report those accesses at base + offsets (int64) that a range check drops though no mask asked for it."""
        if not dropped.any():
            return
        lane = np.nonzero(dropped)[0][0]
        offset = int(offsets[lane])
        if offset >= 2**32 - 2**30:  # a little below the base, rather than far above it
            offset -= 2**32
        message = (
            f"{verb} {size} bytes {self.relative(base + offset)}: the hardware drops the access, for no buffer "
            f"instruction reaches an offset of {offset}"
        )
        self._findings.report(OUT_OF_BOUNDS, message, int(lanes[lane]), base + offset)

    def _report(self, kind, message, buffer, addresses, lanes, chosen, lane):
        address = int(addresses[chosen][lane])
        self._findings.report(
            kind, f"{message}, {buffer.name} at byte {address - buffer.base}", int(lanes[chosen][lane]), address
        )

    def relative(self, address: int) -> str:
        """Where an address lies, in words a kernel's author can use."""
        nearest = min(self.buffers, key=lambda b: max(b.base - address, address - b.end, 0), default=None)
        if nearest is None:
            return "where no buffer was passed"
        if address < nearest.base:
            distance = nearest.base - address
            place = f"{distance} bytes before {nearest.name}"
        else:
            place = f"at byte {address - nearest.base} of {nearest.name}, which has {nearest.data.size}"
            distance = address - nearest.end
        return place if distance <= 2 * GUARD else f"at {address:#x}, near no buffer"


# What an LDS byte holds.
NEVER, WRITTEN, UNDEFINED = 0, 1, 2
# Who touched it since the last barrier: 16 bits for each deed, one per wave.
_READ, _WROTE, _UPDATED = 0, MAX_WAVES, 2 * MAX_WAVES
_ALL = 2**MAX_WAVES - 1
_DEEDS = {_WROTE: "wrote", _UPDATED: "updated atomically", _READ: "read"}


class Lds:
    """The LDS of one workgroup: `size` bytes, with what the sanitizer knows of each byte.

    A race is two waves touching a byte in the same interval between barriers, one of them writing it, and not both in
    an atomic instruction; whether the write changes the byte does not matter. Only waves that all write the same
    value, as replicated layouts do, do no harm: neither to each other nor where one of them reads the byte back.
    """

    def __init__(self, size: int, findings: Findings):
        self.data = np.full(size, POISON, np.uint8)
        self.size = size
        self._findings = findings
        self._state = np.zeros(size, np.uint8)
        self._touched = np.zeros(size, np.uint64)
        self._conflicts: dict[tuple, int] = {}

    def pass_barrier(self) -> None:
        self._touched.fill(0)

    def load(self, addresses: np.ndarray, size: int, lanes: np.ndarray, wave: int, align: int, *, atomic: bool = False):
        """Read `size` bytes at each address: uint8 (n, size), and which of the bytes are a value, bool (n, size).

        atomic: as the first half of an atomic instruction, which `store` completes.
        """
        chosen, places = self._places(addresses, size, lanes, align, "reads")
        out = np.full((addresses.size, size), POISON, np.uint8)
        defined = np.ones(out.shape, bool)
        out[chosen] = self.data[places]
        state = self._state[places]
        if (state != WRITTEN).any():
            defined[chosen] = state != UNDEFINED
            never = (state == NEVER).any(axis=1)
            if never.any():
                lane = np.nonzero(never)[0][0]
                address = int(addresses[chosen][lane])
                self._findings.report(
                    UNINITIALISED, f"reads LDS never written, byte {address}", int(lanes[chosen][lane]), address
                )
        touched = self._touched[places]
        others = touched & _by_others(wave, _READ, _WROTE) if atomic else touched & _by_others(wave, _WROTE, _UPDATED)
        if others.any():
            if not atomic:
                others = np.where(touched & _by(wave, _WROTE), others & _by_others(wave, _UPDATED), others)
            self._report_race("updates" if atomic else "reads", others, places, lanes[chosen])
        self._touched[places] = touched | _by(wave, _UPDATED if atomic else _READ)
        return out, defined

    def store(
        self,
        addresses: np.ndarray,
        data: np.ndarray,
        lanes: np.ndarray,
        wave: int,
        align: int,
        defined: np.ndarray | None = None,
        *,
        atomic: bool = False,
    ) -> None:
        """Write data, uint8 (n, size); `defined`, bool (n, size), tells which bytes are a value, None for all.

        Of lanes with the same address the last one stays. atomic: as the second half of an atomic instruction.
        """
        chosen, places = self._places(addresses, data.shape[1], lanes, align, "writes")
        before = self.data[places]
        self.data[places] = data[chosen]
        self._state[places] = WRITTEN if defined is None else np.where(defined[chosen], WRITTEN, UNDEFINED)
        if atomic:
            return
        touched = self._touched[places]
        others = touched & _by_others(wave, _READ, _WROTE, _UPDATED)
        if others.any():
            same = self.data[places] == before
            harmless = touched >> _WROTE & _ALL  # readers that wrote this value themselves
            others = np.where(same, others & ~(harmless | _ALL << _WROTE), others)
            self._report_race("writes", others, places, lanes[chosen])
        self._touched[places] = touched | _by(wave, _WROTE)

    def _places(self, addresses, size, lanes, align, what):
        if align > 1 and (addresses & (align - 1)).any():
            lane = np.nonzero(addresses & (align - 1))[0][0]
            self._findings.report(
                MISALIGNED,
                f"{what} {size} bytes of LDS at an address that is no multiple of {align}",
                int(lanes[lane]),
                int(addresses[lane]),
            )
        chosen = slice(None)
        inside = (addresses >= 0) & (addresses + size <= self.size)
        if not inside.all():
            lane = np.nonzero(~inside)[0][0]
            self._findings.report(
                OUT_OF_BOUNDS,
                f"{what} {size} bytes of LDS at byte {int(addresses[lane])}; the kernel has {self.size}",
                int(lanes[lane]),
                int(addresses[lane]),
            )
            chosen = inside
        return chosen, addresses[chosen][:, None] + np.arange(size)

    def _report_race(self, verb: str, others: np.ndarray, places: np.ndarray, lanes: np.ndarray) -> None:
        """others: for each byte (n, size) the bits of what other waves did to it; 0 where there is no race."""
        clash = others != 0
        if not clash.any():
            return
        lane = np.nonzero(clash.any(axis=1))[0][0]
        byte = np.nonzero(clash[lane])[0][0]
        address = int(places[lane, byte])
        who, did = next(
            (bits, deed) for shift, deed in _DEEDS.items() if (bits := int(others[lane, byte]) >> shift & _ALL)
        )
        waves = [str(i) for i in range(MAX_WAVES) if who >> i & 1]
        name = f"wave {waves[0]}" if len(waves) == 1 else f"waves {', '.join(waves)}"
        message = f"{verb} LDS byte {address}, which {name} {did} with no barrier between"
        self._findings.report(RACE, message, int(lanes[lane]), address)

    def bank_conflicts(self, addresses: np.ndarray, size: int, lanes: np.ndarray, *, atomic: bool = False) -> int:
        """Extra passes an access takes: lanes go in groups that could fill all banks once, each bank serves one dword
        per pass, and lanes that ask for the same dword share it, except in atomic instructions."""
        key = (size, atomic, addresses.tobytes(), b"" if lanes.size == 64 else lanes.tobytes())
        if key not in self._conflicts:
            self._conflicts[key] = _count_conflicts(addresses, size, lanes, atomic)
        return self._conflicts[key]


def _by(wave: int, deed: int) -> int:
    return 1 << wave + deed


def _by_others(wave: int, *deeds: int) -> int:
    return sum((_ALL & ~(1 << wave)) << deed for deed in deeds)


def _count_conflicts(addresses: np.ndarray, size: int, lanes: np.ndarray, atomic: bool) -> int:
    dwords = max(size // 4, 1)
    group = lanes // max(LDS_BANKS // dwords, 1)
    wanted = (addresses >> 2)[:, None] + np.arange(dwords)
    requests = np.stack([np.repeat(group, dwords), wanted.ravel()], 1)
    if not atomic:
        requests = np.unique(requests, axis=0)
    slots = requests[:, 0] * LDS_BANKS + requests[:, 1] % LDS_BANKS
    hits = np.bincount(slots, minlength=(int(group.max(initial=0)) + 1) * LDS_BANKS)
    return int((hits.reshape(-1, LDS_BANKS).max(axis=1) - 1).clip(0).sum())


class Scratch:
    """The private memory of one wave: `size` bytes for each of its 64 lanes."""

    def __init__(self, size: int, findings: Findings):
        self.size = size
        self._findings = findings
        self._data = np.full((64, size), POISON, np.uint8)
        self._written = np.zeros((64, size), bool)

    def load(self, offsets: np.ndarray, size: int, lanes: np.ndarray):
        """Bytes at each lane's own offset, uint8 (n, size), and which of them are a value, bool (n, size)."""
        inside = self._inside(offsets, size, lanes, "reads")
        out = np.full((offsets.size, size), POISON, np.uint8)
        defined = np.ones(out.shape, bool)
        places = offsets[inside][:, None] + np.arange(size)
        out[inside] = self._data[lanes[inside][:, None], places]
        defined[inside] = self._written[lanes[inside][:, None], places]
        return out, defined

    def store(self, offsets: np.ndarray, data: np.ndarray, lanes: np.ndarray, defined: np.ndarray) -> None:
        """Write data, uint8 (n, size), of which `defined`, bool (n, size), is a value."""
        inside = self._inside(offsets, data.shape[1], lanes, "writes")
        places = offsets[inside][:, None] + np.arange(data.shape[1])
        self._data[lanes[inside][:, None], places] = data[inside]
        self._written[lanes[inside][:, None], places] = defined[inside]

    def _inside(self, offsets, size, lanes, what):
        inside = (offsets >= 0) & (offsets + size <= self.size)
        if not inside.all():
            lane = np.nonzero(~inside)[0][0]
            message = f"{what} {size} bytes of scratch at byte {int(offsets[lane])}; a lane has {self.size}"
            self._findings.report(OUT_OF_BOUNDS, message, int(lanes[lane]), int(offsets[lane]))
        return inside
