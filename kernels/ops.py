"""What every implementation of the op set provides, and the layouts that they share.

Letters in shapes: T tokens of a step, S sequences, H hidden size, N and K a linear layer's outputs and inputs, NH query
heads, KVH key/value heads, D head size, R rotary size (R <= D), B block size, L layers, I MLP size, V vocabulary.

Rules that hold for every op:

* It writes into buffers that it is given and allocates nothing on the device, so that a step can be recorded and replayed.
* Activations are float32. Softmax, norms and accumulation are in float32 whatever the storage. With a quantised weight,
  ``linear`` may quantise its inputs as well, in groups of GROUP_SIZE: the CPU's does, to int16 for int8 and to int8 for the
  int4 kinds. CUDA's takes inputs as pairs of 16-bit floats, exact to 2**-17, unless the weight is float32; with float16
  weights, up to 2**20 in magnitude.
* Storage dtypes are told by the array: ``float32``, ``float16``, or ``uint16`` for the bits of bfloat16; pages of K and V may
  be ``int8`` as well (:mod:`kernels.pages`). Their last dims are then the bytes of float32 scales: a block of keys is
  [D + 4, B], the last four rows of which are B scales in order, and a block of values [B, D + 4], where each token's row ends
  with its own. int8 pages are contiguous.
* The bits of one token's (or sequence's) result do not depend on which others share the call: ``linear`` reduces over K, and
  ``paged_attention`` over a sequence's blocks, in one fixed order. CUDA's ``linear`` has one exception: more than 256 tokens
  are for cuBLAS, with inputs rounded to the weight's dtype, or where that is codes, both to float16.
* Block ids times strides are computed in 64 bits. Slots that hold no token may hold NaN and change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

Array = Any  #: numpy.ndarray or cupy.ndarray

#: The quantised kinds are those of GGUF's Q8_0, Q4_1 and Q4_0 blocks: :mod:`kernels.quantization` says what they mean.
WEIGHT_KINDS = ("float32", "bfloat16", "float16", "int8", "int4", "int4_symmetric")
GROUP_SIZE = 32  #: inputs that share one scale in the quantised kinds
MAX_HEAD_DIM = 256  #: the largest head size that all implementations take
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True)
class PackedWeight:
    """A linear layer's (or an embedding's) weight in the layout that one implementation reads.

    ``shape`` is (N, K): outputs by inputs, or vocabulary by hidden size. ``arrays`` are private to the implementation that
    made them, which may change their layout freely.
    """

    kind: str
    shape: tuple[int, int]
    arrays: tuple[Array, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that the weight takes on its device, padding included."""
        return sum(int(a.nbytes) for a in self.arrays)


class Groups(NamedTuple):
    """n rows on the host, quantised in G groups of 32 inputs each; what they mean is in :mod:`kernels.quantization`.

    The arrays may be strided views, such as fields of a file's blocks, of which the last axis is contiguous.
    """

    #: [n, G, 32]: int8 for the kind int8, uint8 in 0..15 for the int4 kinds. Of these, two may share a byte, as in GGUF's
    #: blocks: [n, G, 16], where byte i has code i in its low half and code i + 16 in its high half.
    codes: Array
    scales: Array  #: float16 [n, G]
    minima: Array | None  #: float16 [n, G] for the kind int4, None for the others


class Ops(Protocol):
    """The op set. Each of ``kernels.reference``, ``kernels.cpu`` and ``kernels.cuda`` is a module of this shape."""

    #: How the two caches permute the axes (block, kv head, token in block, head dim) of the plain layout [nb, KVH, B, D].
    KEY_AXES: tuple[int, int, int, int]
    VALUE_AXES: tuple[int, int, int, int]
    #: Kinds of pages that are taken, of :data:`kernels.pages.PAGE_STORAGE`: int8 need not be.
    PAGE_KINDS: tuple[str, ...]
    #: Whether there is :meth:`sample`. Where logits are in host memory anyway, NumPy draws from them as quickly.
    SAMPLES: bool

    # ---- weights -------------------------------------------------------------------------------------------------------
    def empty_weight(self, shape: tuple[int, int], kind: str, xp: Any) -> PackedWeight:
        """Room for a weight of ``shape`` (N, K), to be filled by :meth:`pack_rows` or :meth:`pack_groups`.

        ``xp`` makes the arrays: the array module, or what has ``zeros`` like it. Raises ValueError where ``kind`` is not one of
        WEIGHT_KINDS.
        """
        ...

    def pack_rows(self, weight: PackedWeight, start: int, rows: Array) -> None:
        """Write host ``rows`` [n, K] (float32, float16 or uint16 = bfloat16) as rows start..start+n of ``weight``.

        Rows already in the weight's own dtype are stored bit for bit; a quantised weight stores what
        :func:`kernels.quantization.quantize` makes of them. Raises ValueError where a value does not fit the kind.
        """
        ...

    def pack_groups(self, weight: PackedWeight, start: int, groups: Groups) -> None:
        """Write host rows that are quantised already as rows start..start+n of a ``weight`` of their kind, bit for bit.

        The codes behind a row's last input, where K is not a multiple of 32, may be anything. Raises ValueError where the
        groups do not fit the weight's kind, shape or place.
        """
        ...

    def unpack_rows(self, weight: PackedWeight, start: int, stop: int) -> Array:
        """The rows start..stop as a host float32 array [n, K]: what the weight means, to the bit."""
        ...

    # ---- layers --------------------------------------------------------------------------------------------------------
    def embed(self, out: Array, weight: PackedWeight, token_ids: Array) -> None:
        """out [T, H] = rows ``token_ids`` [T] int32 of ``weight`` (V, H)."""
        ...

    def rms_norm(self, out: Array, x: Array, weight: Array, eps: float) -> None:
        """out [T, H] = x / sqrt(mean(x^2) + eps) * weight [H] float32. ``out`` may be ``x``."""
        ...

    def add_rms_norm(self, out: Array, h: Array, x: Array, weight: Array, eps: float) -> None:
        """h [T, H] += x, and then out [T, H] = rms_norm(h), with the bits of the two ops. ``out`` may be ``x``."""
        ...

    def layer_norm(self, out: Array, x: Array, weight: Array, bias: Array, eps: float) -> None:
        """out [T, H] = (x - mean) / sqrt(var + eps) * weight + bias, both [H] float32. ``out`` may be ``x``."""
        ...

    def linear(self, out: Array, x: Array, weight: PackedWeight, bias: Array | None) -> None:
        """out [T, N] = x [T, K] @ weight.T + bias [N] float32."""
        ...

    def rope(self, out: Array, x: Array, cos: Array, sin: Array, positions: Array, last: int) -> None:
        """out [T, NH, D] = x rotated as by :meth:`rope_and_cache`, but to the position min(positions[t], ``last``).

        Both may be strided views; ``out`` may be ``x``.
        """
        ...

    def rope_and_cache(
        self,
        q: Array,
        k: Array,
        v: Array,
        cos: Array,
        sin: Array,
        positions: Array,
        key_cache: Array,
        value_cache: Array,
        slots: Array,
    ) -> None:
        """Rotate q and k in place and write k and v into their pages (the fused reshape-and-write of PagedAttention, section 5).

        q [T, NH, D], k and v [T, KVH, D] may be strided views (of one qkv buffer). cos and sin [P, R/2] float32 are looked
        up by ``positions`` [T] int32; the first R of D dims are rotated in halves (dim i with dim i + R/2).
        ``slots`` [T] int64 is block * B + offset; a negative slot is padding and is not written. int8 pages get the codes
        and the scale that :mod:`kernels.pages` says.
        """
        ...

    def paged_attention(
        self,
        out: Array,
        q: Array,
        key_cache: Array,
        value_cache: Array,
        block_tables: Array,
        context_lens: Array,
        query_start: Array,
        scale: float,
        window: int,
        soft_cap: float,
        num_sinks: int = 0,
        sink_q: Array | None = None,
    ) -> None:
        """Causal attention of every query over its sequence's pages; chunked prefill and decode in one call.

        out and q [T, NH, D]. Sequence s owns the queries query_start[s] .. query_start[s+1] (query_start [S+1] int32); they
        are the last tokens of its context_lens[s] (int32, those in the cache already, these queries included).
        block_tables [S, max_blocks] int32; entries wholly outside what a query sees may be -1 and are not read.
        ``window`` W lets a token see itself and the W-1 before it (0: all). ``soft_cap`` c maps a score x to c*tanh(x/c)
        (0: none). Query head h reads kv head h // (NH / KVH).

        The first ``num_sinks`` tokens of a sequence are seen from any distance, each once, and meet ``sink_q`` [T, NH, D]
        in place of q: attention sinks (StreamingLLM, Xiao et al. 2023, section 3.2), whose distance from a query is not
        that in the text but that in the cache, where the window follows the sinks directly. Scores depend on distances
        only, so it is enough to rotate the query once more, for the sinks, and no key is rotated again.
        """
        ...

    def gated_activation(self, out: Array, gate_up: Array, activation: str) -> None:
        """out [T, I] = activation(gate_up[:, :I]) * gate_up[:, I:]; activation is one of ACTIVATIONS."""
        ...

    def add(self, out: Array, x: Array, y: Array) -> None:
        """out = x + y, elementwise, [T, H]. ``out`` may be either."""
        ...

    def gather_rows(self, out: Array, x: Array, rows: Array) -> None:
        """out [n, H] = x[rows], ``rows`` [n] int32."""
        ...

    def sample(self, out: Array, logits: Array, draws: Array) -> None:
        """out [R] int32 = a token of each row of ``logits`` [R, V], which stay as they are; V is at most 2**22.

        ``draws`` [R, DRAW_WORDS] uint32 has a record of :data:`kernels.draws.DRAW` for each row. Weights exp((x - largest) /
        temperature) are computed in float32; then top-k, top-p (the token that crosses is kept; of equal weights the lowest
        ids come first) and min-p follow; and the token is the first, in the order of ids, at which the cumulative weight of
        what is left exceeds the row's random number times their sum. A row whose largest logit is not finite, or that has
        a NaN, gets -1. Sums do not depend on how many threads share a row.
        """
        ...

    # ---- pages ---------------------------------------------------------------------------------------------------------
    def copy_blocks(self, key_cache: Array, value_cache: Array, src: Array, dst: Array) -> None:
        """Copy blocks src[i] to dst[i] (int64 [n]) in all layers of both caches [L, num_blocks, ...], in one launch."""
        ...

    def swap_blocks(
        self, src_keys: Array, src_values: Array, dst_keys: Array, dst_values: Array, src: Array, dst: Array
    ) -> None:
        """Copy blocks src[i] of two pools [L, n1, ...] to dst[i] of two others [L, n2, ...] (device to host, or back), in one
        launch. Host pools are memory that the ops can reach: that of ``Device.empty_host``.
        """
        ...
