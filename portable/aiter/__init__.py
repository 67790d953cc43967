"""An `aiter` for machines without AMD's: MLA decode for 16 heads and one query token, in plain torch, on any device.

It behaves as the real library does on an MI355X (gfx950), mistakes included: the same signatures (contest pin
f3be04a1), refusals, splits, rounding points, return values and aliasing, and page_size > 1 reading only the first token
of each page. Where the real library would read or write memory that is not the caller's, hang, or give noise, it
refuses the call and says why. It is meant to be right, in bounded memory; nothing is claimed about its speed.
`aiter.settings` holds its two switches.

Sources: ROCm/aiter at f3be04a1 (aiter/mla.py, csrc/kernels/mla, csrc/py_itfs_cu/asm_mla.cu) and the behaviour of the
gfx950 code objects it ships. The algorithms are restated here, none of its code is used.
"""

from . import mla
from .metadata import get_mla_metadata_info_v1, get_mla_metadata_v1
from .settings import settings
from .utility import dtypes, fp4_utils

__all__ = ["dtypes", "fp4_utils", "get_mla_metadata_info_v1", "get_mla_metadata_v1", "mla", "settings"]
