"""The interface of layers that keep a state of a fixed size instead of keys and values: the gated delta rule.

Each sequence has a slot. A step reads a sequence's state from one slot and writes the state after its last token of the
step to one slot, which may be the same. Slot 0 is no sequence's: what it has is undefined, and padding rows use it.

Pieces are 64 tokens at absolute positions: piece k of a sequence covers its positions [64 k, 64 k + 64). A step works
on a part of the first and of the last piece that it touches. Results do not depend on the other sequences of a step.
They depend on where steps cut a prompt only if a cut lies inside a piece: cuts at multiples of 64 change no bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

PIECE = 64  # tokens


class StateCache(NamedTuple):
    """One layer's states of all slots, of this rank's heads. Slots and heads may have any stride."""

    conv: torch.Tensor
    """[slots, key_heads, channels of one, width - 1], the model's dtype: the last inputs, oldest first.

    A key head's channels are those of its query, of its key, and of the values of its value heads, so that ranks split
    heads. A head's part is contiguous.
    """
    recurrent: torch.Tensor  # float32 [slots, value_heads, key_dim, value_dim]; a head's part is contiguous


class StatePlan(NamedTuple):
    """Where the states of a step's sequences are. All layers use it. Tensors are on the device.

    No slot is written that another sequence of the step reads or writes, except slot 0; no slot of `saves` is read or
    written twice. A sequence may have no token: then nothing is read or written for it. Tokens from `starts[-1]` on are
    padding, with undefined results.
    """

    sources: torch.Tensor  # int32 [seqs]: the slot that the state is read from; -1: it begins with zeros
    slots: torch.Tensor  # int32 [seqs]: the slot that the state is written to after the last token of this step
    starts: torch.Tensor  # int32 [seqs + 1]: sequence i has tokens [starts[i], starts[i + 1]) of the step
    positions: torch.Tensor  # int32 [seqs]: tokens of the sequence before this step
    saves: torch.Tensor | None  # int32 [pieces], at least piece_starts[-1]; None: nothing is saved
    """For each piece that a sequence touches, of each sequence in turn: the slot that the state at the piece's end is
    copied to, -1 for none. Only pieces that are complete after this step may have one. Its length is the size of
    launches: a step that knows the number of its pieces gives it, also if nothing is saved.
    """
    piece_starts: torch.Tensor  # int32 [seqs + 1]: sequence i touches pieces [piece_starts[i], piece_starts[i + 1])
    is_decode: bool = False  # each sequence has exactly one token: token i is of sequence i. `saves` may be given too


class StateGates(NamedTuple):
    """What `StateOps.gates` makes decays and betas of."""

    a: torch.Tensor  # [T, H]
    b: torch.Tensor
    A_log: torch.Tensor  # [H]
    dt_bias: torch.Tensor


class StateOps(Protocol):
    """The functions of such a layer. `torch_state` defines the results.

    T tokens, C channels, H value heads; the heads of q and k divide them: value head h uses key head h // (H / heads).
    The rows of a token are contiguous, and the distance of tokens is the first stride.
    """

    def problem(self, key_dim: int, value_dim: int) -> str:
        """Why heads of these sizes cannot be computed; "": they can."""

    def convolve(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cache: StateCache, plan: StatePlan
    ) -> torch.Tensor:
        """silu of the causal convolution of each channel alone, over `x` [T, C] and the inputs before it.

        The channels of `x`: queries of all key heads, their keys, then the values of all value heads. `weight`
        [C, width], the oldest input's first; `bias` [C]. The new inputs are written to `cache.conv`. -> [T, C] of the
        dtype of `x`.
        """

    def gates(
        self, a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The logarithm of the decay, -exp(A_log) softplus(a + dt_bias), and beta, sigmoid(b). Both float32 [T, H].

        `a`, `b` [T, H]; `A_log`, `dt_bias` [H].
        """

    def mix_gated(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        gates: StateGates,
        recurrent: torch.Tensor,
        plan: StatePlan,
        scale: float,
    ) -> torch.Tensor:
        """`gates`, then `mix`."""

    def mix(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        recurrent: torch.Tensor,
        plan: StatePlan,
        scale: float,
    ) -> torch.Tensor:
        """The gated delta rule (arXiv 2412.06464). -> [T, H, value_dim] of the dtype of `v`.

        `q`, `k` [T, heads, key_dim], divided by their lengths here; `v` [T, H, value_dim]; `g`, `beta` float32 [T, H].
        For each token: S = exp(g) S; S += k (beta (v - S^T k))^T; the result is scale S^T q. `recurrent` is that of a
        StateCache: S is read from it and written to it.
        """

    def gated_norm(self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm of `x` [T, H, D] times `weight` [D] times silu(`gate` [T, H, D]), rounded once. -> [T, H, D]."""
