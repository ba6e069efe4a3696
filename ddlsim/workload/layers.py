"""The layer types of model files, with their shapes, parameters and costs.

One frozen dataclass per type. Its fields are the keys of the file (and all that an implementation needs to
execute the layer); its method ``cost(in_shape)`` derives shape, parameters, multiply-accumulates and memory
traffic for one sample. Shapes exclude the batch: images are (channels, height, width), volumes (channels,
depth, height, width), text is (tokens,) and then (tokens, features), anything else a vector (features,).

The rules are those of ``torch.nn`` (documentation of Conv2d, MaxPool2d, BatchNorm2d, MultiheadAttention ...),
so that shapes and parameter counts agree with the published ones to the last digit. Multiply-accumulates are counted
only for convolutions, dense layers, attention and interactions, as in torchvision and most papers; element-wise work
appears as memory traffic, which limits it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Protocol, cast, get_args, get_type_hints

from ddlsim.arguments import Count, Decay, Index, number
from ddlsim.errors import ConfigError
from ddlsim.workload.layer_rules import Cost, Shape, Spec, need_map, need_tokens, spread, streaming, windows

Fraction = Annotated[float, number(0.0, 1.0, above=True)]
Size = Annotated[Count | tuple[Count, ...], "an integer or a list with one integer per dimension"]
Padding = Annotated[Index | tuple[Index, ...], "an integer or a list with one integer per dimension"]


@dataclass(frozen=True)
class MixtureOfExperts(Spec):
    """A feed-forward network in ``experts`` copies, of which a router chooses ``active`` for each token.

    An expert is silu(x W) * (x V) times a third matrix, ``units`` wide in between (Shazeer 2020, arXiv:2002.05202), or
    without ``gated`` two matrices with a non-linearity. The outputs of a token's experts are added up, weighted by the
    router's softmax (Shazeer et al. 2017, arXiv:1701.06538, section 2; Jiang et al. 2024, Mixtral of experts,
    arXiv:2401.04088, section 2.1). None of the matrices has a bias.

    Experts have ``capacity`` * active slots per token, and compute all of them, whether used or not (Fedus et al. 2022,
    Switch Transformers, arXiv:2101.03961, equation 3). A capacity of 1 is exact if tokens are spread evenly or nothing
    is padded (Gale et al. 2023, MegaBlocks, arXiv:2211.15841).

    Per sample of s tokens and d features, E experts of width f, k of them active: s d E MACs in the router and
    3 k s d f ``capacity`` in the experts (2 without ``gated``); d E + 3 E d f parameters.
    """

    experts: Count
    active: Count
    units: Count
    gated: bool = True
    capacity: float = 1.0
    type: Literal["mixture_of_experts"] = "mixture_of_experts"

    def __post_init__(self) -> None:
        if self.active > self.experts:
            raise ConfigError(f"active = {self.active}: must be at most experts = {self.experts}")
        if not 0.0 < self.capacity <= self.experts:
            raise ConfigError(f"capacity = {self.capacity}: must be above 0 and at most experts = {self.experts}")

    def rows(self, in_shape: Shape) -> float:
        """Return the number of slots that experts have for the tokens of a sample."""
        return self.capacity * self.active * in_shape[0]

    def cost(self, in_shape: Shape) -> Cost:
        need_tokens(in_shape)
        s, d = in_shape
        names = ("gate", "up", "down") if self.gated else ("up", "down")
        matrices = tuple((f"{name}.weight", self.experts * d * self.units) for name in names)
        rows = self.rows(in_shape)  # one per token and expert that it is sent to
        macs = float(s * d * self.experts + len(names) * rows * d * self.units)
        # Tokens are read, copied to their experts and read there; results are written, read and summed. In between, as
        # in SwiGLU, both products are written and read, and their product is written and read.
        inner = 5 if self.gated else 3
        moved = float(2 * s * d + 4 * rows * d + (inner + 1) * rows * self.units + 2 * s * self.experts)
        stored = float(s * d + 2 * rows * d + (inner + 1) // 2 * rows * self.units + s * self.experts)
        return Cost(in_shape, (("router.weight", self.experts * d), *matrices), macs, moved, stored)


@dataclass(frozen=True)
class Attention(Spec):
    """Multi-head self-attention with its four projections (Vaswani et al. 2017, section 3.2).

    fused      whether query, key and value projections are one tensor, as in GPT-2
    kv_heads   heads of keys and values, each shared by heads / kv_heads queries (grouped-query attention, Ainslie et
               al. 2023, arXiv:2305.13245); None: as many as query heads
    head_size  features of a head; None: the features of a token divided by heads
    out_bias   bias of the output projection; None: as `bias`, which applies to query, key and value (Qwen2)
    qk_norm    RMS normalisation of queries and keys, of each head with one shared scale per projection ("head": Qwen3,
               Gemma 3) or over all of them ("all": OLMo 2)
    rotary     queries and keys are rotated by their position (Su et al. 2021, arXiv:2104.09864), without parameters

    Per sample of s tokens and d features, w = heads head_size in queries and k = kv_heads head_size in keys: 2 s d (w +
    k) MACs in the projections and 2 s^2 w in scores and mixing. Causal masks and sliding windows do not reduce them.
    """

    heads: Count
    fused: bool = False
    causal: bool = False
    kv_heads: Count | None = None
    bias: bool = True
    rotary: bool = False
    head_size: Count | None = None
    out_bias: bool | None = None
    qk_norm: Literal["none", "head", "all"] = "none"
    type: Literal["attention"] = "attention"

    def __post_init__(self) -> None:
        _check_heads(self.heads, self.kv_heads)

    def cost(self, in_shape: Shape) -> Cost:
        need_tokens(in_shape)
        s, d = in_shape
        size = self.head_size or _head_size(d, self.heads, in_shape)
        w, k = self.heads * size, (self.kv_heads or self.heads) * size
        inputs = (("qkv", w + 2 * k),) if self.fused else (("query", w), ("key", k), ("value", k))
        tensors = _projections(inputs, d, bias=self.bias)
        tensors += _projections((("out", d),), w, bias=self.bias if self.out_bias is None else self.out_bias)
        n, n_query, n_kv, scores = s * d, s * w, s * k, self.heads * s * s
        # x to q, k, v: n + q + 2 kv; scores written, softmax in and out, read again: 4 scores; mix and project:
        # n + 2 q + kv
        moved, stored = 2.0 * n + 3.0 * n_query + 3.0 * n_kv + 4.0 * scores, n + 2.0 * n_query + 2.0 * n_kv + scores
        moved += self.rotated(in_shape)
        if self.qk_norm != "none":  # normalised inputs are kept in addition
            stored += n_query + n_kv
            scales = (size, size) if self.qk_norm == "head" else (w, k)
            tensors += (("query_norm.scale", scales[0]), ("key_norm.scale", scales[1]))
        return Cost(in_shape, tensors, 2.0 * s * d * (w + k) + 2.0 * s * s * w, moved, stored)

    def rotated(self, in_shape: Shape) -> float:
        """Return the elements that rotary positions and norms read and write: queries and keys once, in place."""
        size = self.head_size or _head_size(in_shape[1], self.heads, in_shape)
        passes = int(self.rotary) + int(self.qk_norm != "none")
        return 2.0 * passes * in_shape[0] * size * (self.heads + (self.kv_heads or self.heads))


@dataclass(frozen=True)
class CrossAttention(Spec):
    """Attention of a decoder's tokens to the ``context`` tokens before them (Vaswani et al. 2017, section 3.2.3).

    Its input consists of ``context`` tokens from an encoder, followed by the decoder's own tokens; it returns one
    output per decoder token. For t such tokens, c of context and d features: 2 (t + c) d^2 MACs in the projections (k
    in place of d for keys and values of fewer heads) and 2 t c d in scores and mixing.
    """

    heads: Count
    context: Count
    kv_heads: Count | None = None
    bias: bool = True
    type: Literal["cross_attention"] = "cross_attention"

    def __post_init__(self) -> None:
        _check_heads(self.heads, self.kv_heads)

    def cost(self, in_shape: Shape) -> Cost:
        need_tokens(in_shape)
        c, d = self.context, in_shape[1]
        t = in_shape[0] - c
        if t < 1:
            raise ConfigError(f"context = {c}: must be less than the number of input tokens, {in_shape[0]}")
        k = _head_size(d, self.heads, in_shape) * (self.kv_heads or self.heads)
        tensors = _projections((("query", d), ("key", k), ("value", k), ("out", d)), d, bias=self.bias)
        n, n_context, n_kv, scores = t * d, c * d, c * k, self.heads * t * c
        # as self-attention, but keys and values are computed from another input than queries
        moved, stored = 5.0 * n + n_context + 3.0 * n_kv + 4.0 * scores, 3.0 * n + 2.0 * n_kv + scores
        return Cost((t, d), tensors, 2.0 * (t * d * d + c * d * k) + 2.0 * t * c * d, moved, stored)


@dataclass(frozen=True)
class SwiGLU(Spec):
    """silu(x W) * (x V): the gated first half of a feed-forward network (Shazeer 2020, arXiv:2002.05202).

    GeGLU, with GELU instead of SiLU, has the same cost.
    """

    units: Count
    bias: bool = False
    type: Literal["swiglu"] = "swiglu"

    def cost(self, in_shape: Shape) -> Cost:
        need_tokens(in_shape)
        s, d = in_shape
        tensors = _projections((("gate", self.units), ("up", self.units)), d, bias=self.bias)
        n_out = float(s * self.units)
        # both products are written, read and multiplied; both are kept for the backward pass in addition to the result
        return Cost((s, self.units), tensors, 2.0 * s * d * self.units, s * d + 5.0 * n_out, 3.0 * n_out)


@dataclass(frozen=True)
class RMSNorm(Spec):
    """Division by the root mean square of the last dimension, with a learned scale (Zhang and Sennrich 2019)."""

    eps: Fraction = 1e-6
    type: Literal["rms_norm"] = "rms_norm"

    def cost(self, in_shape: Shape) -> Cost:
        return streaming(in_shape, in_shape, (("weight", in_shape[-1]),))


def _check_heads(heads: int, kv_heads: int | None) -> None:
    if kv_heads is not None and heads % kv_heads:
        raise ConfigError(f"kv_heads = {kv_heads}: must divide heads = {heads}")


def _head_size(features: int, heads: int, in_shape: Shape) -> int:
    """Return the number of features of a head."""
    if features % heads:
        raise ConfigError(f"heads = {heads} must divide the {features} features of input shape {in_shape}")
    return features // heads


def _projections(widths: tuple[tuple[str, int], ...], features: int, *, bias: bool) -> tuple[tuple[str, int], ...]:
    """Return the tensors of dense layers from `features` to each of the widths."""
    return tuple(
        (f"{name}.{part}", width * size)
        for name, width in widths
        for part, size in ((("weight", features), ("bias", 1)) if bias else (("weight", features),))
    )


@dataclass(frozen=True)
class TiedDense(Spec):
    """Dense layer whose weight is the token embedding, so its only parameter can be a bias (Press and Wolf 2017)."""

    units: Count
    bias: bool = True
    type: Literal["tied_dense"] = "tied_dense"

    def cost(self, in_shape: Shape) -> Cost:
        need_tokens(in_shape)
        tensors = (("bias", self.units),) if self.bias else ()
        macs = float(math.prod(in_shape) * self.units)
        return streaming(in_shape, (in_shape[0], self.units), tensors, macs)


@dataclass(frozen=True)
class Embedding(Spec):
    """Token embedding plus learned position and token-type embeddings, unless their counts are 0."""

    vocabulary: Count
    dim: Count
    positions: Index = 0
    types: Index = 0
    type: Literal["embedding"] = "embedding"

    def cost(self, in_shape: Shape) -> Cost:
        if len(in_shape) != 1:
            raise ConfigError(f"the input must have shape (tokens,), not {in_shape}; make this layer the first one")
        if self.positions and in_shape[0] > self.positions:
            n_tokens = in_shape[0]
            raise ConfigError(f"positions = {self.positions}: must be at least the number of input tokens, {n_tokens}")
        tables = (("tokens", self.vocabulary), ("positions", self.positions), ("types", self.types))
        tensors = tuple((name, rows * self.dim) for name, rows in tables if rows)
        n_out = float(in_shape[0] * self.dim)
        return Cost((in_shape[0], self.dim), tensors, moved=(len(tensors) + 1) * n_out, stored=n_out)


@dataclass(frozen=True)
class PatchEmbedding(Spec):
    """Patches of ``patch`` x ``patch`` pixels as tokens after a class token, with learned positions (Dosovitskiy et
    al. 2021, An image is worth 16x16 words, arXiv:2010.11929)."""

    patch: Count
    dim: Count
    type: Literal["patch_embedding"] = "patch_embedding"

    def cost(self, in_shape: Shape) -> Cost:
        need_map(in_shape)
        if len(in_shape) != 3 or any(size % self.patch for size in in_shape[1:]):
            raise ConfigError(f"patch = {self.patch}: must divide the height and width of the input, {in_shape}")
        n_tokens = 1 + math.prod(size // self.patch for size in in_shape[1:])
        n_weights = self.dim * in_shape[0] * self.patch**2
        tensors = (("weight", n_weights), ("bias", self.dim), ("class", self.dim), ("positions", n_tokens * self.dim))
        return streaming(in_shape, (n_tokens, self.dim), tensors, float(n_weights * (n_tokens - 1)))


@dataclass(frozen=True)
class TiedEmbedding(Spec):
    """Token embedding that uses the table of another layer, so it has no parameters (Press and Wolf 2017)."""

    dim: Count
    type: Literal["tied_embedding"] = "tied_embedding"

    def cost(self, in_shape: Shape) -> Cost:
        if len(in_shape) != 1:
            raise ConfigError(
                f"the input must have shape (tokens,), not {in_shape}; make this layer the first one of its branch"
            )
        n_out = float(in_shape[0] * self.dim)
        return Cost((in_shape[0], self.dim), moved=2.0 * n_out, stored=n_out)


@dataclass(frozen=True)
class EmbeddingBag(Spec):
    """Categorical features of a recommendation model: for each table, the sum of `pooling` rows, concatenated.

    The tables are model-parallel (each is on one device), so their gradients are not exchanged between
    data-parallel workers (Naumov et al. 2019, arXiv:1906.00091, section 4).
    """

    tables: tuple[Count, ...]  # number of rows of each table
    dim: Count
    pooling: Count = 1
    type: Literal["embedding_bag"] = "embedding_bag"

    def cost(self, in_shape: Shape) -> Cost:
        n_out = len(self.tables) * self.dim
        tensors = tuple((f"table{i}", rows * self.dim) for i, rows in enumerate(self.tables))
        return Cost((n_out,), tensors, moved=(self.pooling + 1.0) * n_out, stored=float(n_out))


@dataclass(frozen=True)
class Interaction(Spec):
    """DLRM's dot products between all pairs of feature vectors, with the first vector kept in front."""

    dim: Count
    type: Literal["interaction"] = "interaction"

    def cost(self, in_shape: Shape) -> Cost:
        if len(in_shape) != 1 or in_shape[0] % self.dim:
            raise ConfigError(
                f"the input must be a vector whose length is a multiple of dim = {self.dim}, but its shape is "
                f"{in_shape}"
            )
        n_vectors = in_shape[0] // self.dim
        n_pairs = n_vectors * (n_vectors - 1) // 2
        return streaming(in_shape, (self.dim + n_pairs,), macs=float(n_vectors * n_vectors * self.dim))


@dataclass(frozen=True)
class Take(Spec):
    """The first ``count`` tokens (BERT's pooler reads one, its masked-token head the masked positions), or numbers of a
    vector."""

    count: Count
    type: Literal["take"] = "take"

    def cost(self, in_shape: Shape) -> Cost:
        if len(in_shape) > 2:
            raise ConfigError(
                f"the input must have shape (tokens, features) or (features,), not {in_shape}; add 'flatten' "
                "before this layer"
            )
        if self.count > in_shape[0]:
            items = "tokens" if len(in_shape) == 2 else "elements"
            raise ConfigError(f"count = {self.count}: must be at most the number of input {items}, {in_shape[0]}")
        n_out = float(self.count * math.prod(in_shape[1:]))
        return Cost((self.count, *in_shape[1:]), moved=2.0 * n_out, stored=n_out)


@dataclass(frozen=True)
class Slice(Spec):
    """``count`` channels, tokens or features from number ``first`` on: a view, which moves and keeps no data.

    With a ``concat`` that does not copy, it carries several tensors through a model, such as the encoder's output for a
    decoder, or the two inputs of a cell.
    """

    first: Index = 0
    count: Count | None = None  # None: all from `first` on
    type: Literal["slice"] = "slice"

    def cost(self, in_shape: Shape) -> Cost:
        count = in_shape[0] - self.first if self.count is None else self.count
        if count < 1 or self.first + count > in_shape[0]:
            raise ConfigError(
                f"first = {self.first}, count = {self.count}: out of range for the first dimension of {in_shape}"
            )
        return Cost((count, *in_shape[1:]))


@dataclass(frozen=True)
class InstanceNorm(Spec):
    """Normalisation of each channel of each sample, without parameters (Ulyanov, Vedaldi and Lempitsky 2016)."""

    eps: Fraction = 1e-5
    type: Literal["instance_norm"] = "instance_norm"

    def cost(self, in_shape: Shape) -> Cost:
        need_map(in_shape)
        return streaming(in_shape, in_shape)


@dataclass(frozen=True)
class LeakyReLU(Spec):
    """x if positive, else ``slope`` x (Maas, Hannun and Ng 2013), not in place."""

    slope: Decay = 0.01
    type: Literal["leaky_relu"] = "leaky_relu"

    def cost(self, in_shape: Shape) -> Cost:
        return streaming(in_shape, in_shape)


@dataclass(frozen=True)
class Upsample(Spec):
    """Repeats every pixel ``scale`` times in each spatial dimension (nearest neighbour, as in torch.nn.Upsample)."""

    scale: Count
    type: Literal["upsample"] = "upsample"

    def cost(self, in_shape: Shape) -> Cost:
        need_map(in_shape)
        return streaming(in_shape, (in_shape[0], *(self.scale * size for size in in_shape[1:])))


@dataclass(frozen=True)
class Conv(Spec):
    """Convolution over any number of spatial dimensions (cross-correlation, zero padding)."""

    channels: Count
    kernel: Size
    stride: Size = 1
    padding: Padding = 0
    groups: Count = 1
    bias: bool = True
    type: Literal["conv"] = "conv"

    def cost(self, in_shape: Shape) -> Cost:
        need_map(in_shape)
        n_in, space = in_shape[0], in_shape[1:]
        if n_in % self.groups or self.channels % self.groups:
            raise ConfigError(
                f"groups = {self.groups}: must divide both the number of input channels ({n_in}) and the number of "
                f"output channels ({self.channels})"
            )
        kernel = spread("kernel", self.kernel, len(space))
        stride = spread("stride", self.stride, len(space))
        padding = spread("padding", self.padding, len(space))
        out_space = windows(space, kernel, stride, padding, ceil_mode=False)
        n_weights = self.channels * (n_in // self.groups) * math.prod(kernel)
        tensors = (("weight", n_weights),) + ((("bias", self.channels),) if self.bias else ())
        cost = streaming(in_shape, (self.channels, *out_space), tensors, float(n_weights * math.prod(out_space)))
        # Lavin and Gray 2016: 3x3 convolutions of stride 1; libraries do not use it for grouped ones
        winograd = kernel == (3, 3) and stride == (1, 1) and self.groups == 1
        return replace(cost, winograd=winograd, window=math.prod(kernel))


@dataclass(frozen=True)
class Pool(Spec):
    """Max or average pooling; ``count_padding`` includes the zeros of the padding in an average."""

    type: Literal["max_pool", "avg_pool"]
    kernel: Size
    stride: Size | None = None  # None: the kernel size
    padding: Padding = 0
    ceil_mode: bool = False
    count_padding: bool = True

    def cost(self, in_shape: Shape) -> Cost:
        need_map(in_shape)
        space = in_shape[1:]
        kernel = spread("kernel", self.kernel, len(space))
        stride = kernel if self.stride is None else spread("stride", self.stride, len(space))
        padding = spread("padding", self.padding, len(space))
        out_space = windows(space, kernel, stride, padding, ceil_mode=self.ceil_mode)
        return replace(streaming(in_shape, (in_shape[0], *out_space)), window=math.prod(kernel))


@dataclass(frozen=True)
class AdaptiveAvgPool(Spec):
    """Average pooling to a fixed spatial size (``size = 1`` is global average pooling)."""

    size: Size
    type: Literal["adaptive_avg_pool"] = "adaptive_avg_pool"

    def cost(self, in_shape: Shape) -> Cost:
        need_map(in_shape)
        return streaming(in_shape, (in_shape[0], *spread("size", self.size, len(in_shape) - 1)))


@dataclass(frozen=True)
class Dense(Spec):
    """Affine map of the last dimension (of a vector, or of every token)."""

    units: Count
    bias: bool = True
    type: Literal["dense"] = "dense"

    def cost(self, in_shape: Shape) -> Cost:
        if len(in_shape) > 2:
            raise ConfigError(
                f"the input must have shape (features,) or (tokens, features), not {in_shape}; add 'flatten' "
                "before this layer"
            )
        n_weights = in_shape[-1] * self.units
        tensors = (("weight", n_weights),) + ((("bias", self.units),) if self.bias else ())
        n_tokens = math.prod(in_shape[:-1])
        return streaming(in_shape, (*in_shape[:-1], self.units), tensors, float(n_tokens * n_weights))


@dataclass(frozen=True)
class BatchNorm(Spec):
    """Batch normalisation per channel with learned scale and shift (Ioffe and Szegedy 2015)."""

    eps: Fraction = 1e-5
    momentum: Fraction = 0.1  # weight of the new batch in the running statistics
    type: Literal["batch_norm"] = "batch_norm"

    def cost(self, in_shape: Shape) -> Cost:
        return streaming(in_shape, in_shape, (("weight", in_shape[0]), ("bias", in_shape[0])))


@dataclass(frozen=True)
class LayerNorm(Spec):
    """Layer normalisation of the last dimension with learned scale and shift (Ba, Kiros and Hinton 2016)."""

    eps: Fraction = 1e-5
    type: Literal["layer_norm"] = "layer_norm"

    def cost(self, in_shape: Shape) -> Cost:
        return streaming(in_shape, in_shape, (("weight", in_shape[-1]), ("bias", in_shape[-1])))


@dataclass(frozen=True)
class Activation(Spec):
    """Element-wise non-linearity. ReLU works in place. The square of a ReLU (So et al. 2021) is not trained."""

    type: Literal["relu", "gelu", "tanh", "sigmoid", "squared_relu"]

    def cost(self, in_shape: Shape) -> Cost:
        n = float(math.prod(in_shape))
        return Cost(in_shape, moved=2.0 * n, stored=0.0 if self.type == "relu" else n)


@dataclass(frozen=True)
class Dropout(Spec):
    """Sets each element to zero with probability ``rate`` while training, or ``whole_channels`` (timing only)."""

    rate: Decay = 0.5
    whole_channels: bool = False  # torch.nn.Dropout2d
    type: Literal["dropout"] = "dropout"

    def cost(self, in_shape: Shape) -> Cost:
        return streaming(in_shape, in_shape)


@dataclass(frozen=True)
class Flatten(Spec):
    """A vector of all elements; moves no data."""

    type: Literal["flatten"] = "flatten"

    def cost(self, in_shape: Shape) -> Cost:
        return Cost((math.prod(in_shape),))


class LayerSpec(Protocol):
    """A layer of a model: a frozen dataclass, whose fields are the keys of the file."""

    def cost(self, in_shape: Shape) -> Cost:
        """Return the cost for one sample of this shape. Raises ConfigError for an invalid shape."""


#: ``type`` in a file -> the dataclass that describes it
LAYER_TYPES: dict[str, type[LayerSpec]] = {
    name: cast("type[LayerSpec]", kind)
    for kind in Spec.__subclasses__()
    if kind.__module__ == __name__
    for name in get_args(get_type_hints(kind)["type"])
}
