"""Language models of one form, a stack of equal decoder layers, as tables of model files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ddlsim.errors import ConfigError

Table = dict[str, object]


class Read(NamedTuple):
    """A model file that was made of another one.

    kind     of model, the beginning of its name
    reads    tokens of the longest sequences that the model takes; 0: as many as it is trained on
    window   tokens that some of its layers attend to at most; 0: all
    active, experts
             experts that a token uses, and all of a layer; 0: there are none
    """

    table: Table
    kind: str
    reads: int = 0
    window: int = 0
    active: int = 0
    experts: int = 0


@dataclass(frozen=True)
class Decoder:
    """The numbers and choices that make a decoder.

    hidden      width of the feed-forward network, or of one of its `experts`, of which each token goes to `active`
    positions   rows of a table of learned positions; 0: there is none
    gated       the feed-forward network has a gate, with any non-linearity; otherwise `activation` is its own
    post_norm   normalisations behind attention and feed-forward network; `pre_norm`: in front of them
    parallel    both have the same input, with a "shared" normalisation or "separate" ones (GPT-NeoX)
    """

    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    vocabulary: int
    seq: int
    norm: Literal["rms_norm", "layer_norm"] = "rms_norm"
    pre_norm: bool = True
    post_norm: bool = False
    embedding_norm: bool = False
    qk_norm: Literal["head", "all"] | None = None
    gated: bool = True
    activation: str = "gelu"
    fused: bool = False
    rotary: bool = True
    bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    tied: bool = False
    positions: int = 0
    dropout: float = 0.0
    parallel: Literal["shared", "separate"] | None = None
    experts: int = 0
    active: int = 0

    def table(self, title: str, source: str) -> Table:
        """Return the model file, in which the numbers are parameters."""
        dropout: list[Table] = [{"type": "dropout", "rate": self.dropout}] if self.dropout else []
        norm: list[Table] = [{"type": self.norm}]
        before, after = (norm if self.pre_norm else []), [*dropout, *(norm if self.post_norm else [])]
        attention: list[Table] = [*before, self._attention(), *after]
        mlp: list[Table] = [*before, *self._mlp(), *after]
        residuals: list[Table] = [{"type": "residual", "body": attention}, {"type": "residual", "body": mlp}]
        if self.parallel:
            shared = norm if self.parallel == "shared" else []
            both = {"type": "residual", "body": attention[len(shared) :], "shortcut": mlp[len(shared) :]}
            residuals = [{"type": "residual", "body": [*shared, both]}]
        embedding: Table = {
            "type": "embedding",
            "vocabulary": "$vocabulary",
            "dim": "$dim",
            "positions": self.positions,
        }
        output = {"type": "tied_dense" if self.tied else "dense", "units": "$vocabulary", "bias": self.head_bias}
        names = ("layers", "dim", "heads", "kv_heads", "head_size", "hidden", "vocabulary", "seq")
        return {
            "title": f"{title}, sequences of $seq tokens",
            "sources": [source],
            "input": ["$seq"],
            "layers": [
                {"name": "embedding", **embedding},
                *(norm if self.embedding_norm else []),
                *dropout,
                {"block": "decoder", "name": "layers", "repeat": "$layers"},
                *norm,
                {"name": "output", **output},
            ],
            "blocks": {"decoder": {"layers": residuals}},
            "parameters": {name: getattr(self, name) for name in names},
        }

    def _attention(self) -> Table:
        sizes = {name: f"${name}" for name in ("heads", "kv_heads", "head_size")}
        choices = {"fused": self.fused, "causal": True, "rotary": self.rotary, "bias": self.bias}
        norms = {"qk_norm": self.qk_norm} if self.qk_norm else {}
        return {"type": "attention", **sizes, **choices, "out_bias": self.out_bias, **norms}

    def _mlp(self) -> list[Table]:
        width: Table = {"units": "$hidden"}
        if self.experts:
            numbers = {"experts": self.experts, "active": self.active, "gated": self.gated}
            return [{"type": "mixture_of_experts", **width, **numbers}]
        biased = {**width, "bias": self.mlp_bias}
        first = (
            [{"type": "swiglu", **biased}] if self.gated else [{"type": "dense", **biased}, {"type": self.activation}]
        )
        return [*first, {"type": "dense", "units": "$dim", "bias": self.mlp_bias}]


def not_simulated(where: str, what: str, n_params: int, n_active: int) -> ConfigError:
    """Return the error for a model whose parameters are counted, but not simulated."""
    count = f"it has {n_params:,} parameters" + (f", of which a token uses {n_active:,}" if n_active < n_params else "")
    return ConfigError(f"{where}: {what} cannot be simulated yet; {count}")
