"""The measurements of `python -m benchmarks gpu`: shapes, their rows, and a peer's figures for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmarks.shapes import CONFIGS
from pd_cluster.models.quantization import BYTES_OF_FORM

if TYPE_CHECKING:
    from collections.abc import Sequence

MIXED_SEQUENCES = 256
KINDS = ("decode", "draws", "prefill", "prompt", "mixed")
# Settings of the requests of a row of kind "draws". `temperature` is what others are compared with
DRAWS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "limits": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "penalties": {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05, "frequency_penalty": 0.1},
    "logprobs": {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "logprobs": 5},
}


@dataclass(frozen=True, slots=True)
class GpuRow:
    """A measurement to make. `peer`: the peer's figure in the row's unit; None: not measured."""

    kind: str  # decode, draws: ms a step; prefill: tokens/s; prompt: ms to the first token; mixed: output tokens/s
    count: int
    length: int  # tokens of a prompt
    peer: float | None
    draws: str = ""  # a key of DRAWS; "": greedy

    @property
    def name(self) -> str:
        match self.kind:
            case "decode":
                return f"decode ms/step, B = {self.count}, {self.length} context"
            case "draws":
                return f"decode ms/step, B = {self.count}, {self.draws}"
            case "prefill":
                return f"prefill tok/s, {self.count} x {self.length}"
            case "prompt":
                return f"one prompt of {self.length}, ms"
        return "W1, output tok/s"

    @property
    def is_rate(self) -> bool:
        """Whether more is better."""
        return self.kind in ("prefill", "mixed")


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's config, and its measurements."""

    name: str
    config: dict[str, Any]
    rows: tuple[GpuRow, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight of the layers, but for packed experts. Embeddings, head and KV have 2."""
        return 1 if "quantization_config" in self.config and not self.form else 2

    @property
    def form(self) -> str:
        """The form of packed experts; "": they are not."""
        method = str(self.config.get("quantization_config", {}).get("quant_method", ""))
        return method if method in BYTES_OF_FORM else ""


def _short_rows(decodes: dict[int, float | None], prefills: Sequence[float | None], prompt: float | None) -> Any:
    """Decodes by their number, prefills of 64 x 1024 and 16 x 4096, a prompt of 1024: with the peer's figures."""
    return (
        *(GpuRow("decode", count, 1024, peer) for count, peer in decodes.items()),
        GpuRow("prefill", 64, 1024, prefills[0]), GpuRow("prefill", 16, 4096, prefills[1]),
        GpuRow("prompt", 1, 1024, prompt),
    )  # fmt: skip


_ROWS: dict[str, tuple[GpuRow, ...]] = {
    "8b": (
        GpuRow("decode", 1, 1024, 4.90), GpuRow("decode", 32, 1024, 6.24), GpuRow("decode", 128, 1024, 10.46),
        GpuRow("decode", 256, 1024, 17.58), GpuRow("decode", 32, 4096, 8.98), GpuRow("decode", 128, 4096, 22.21),
        *(GpuRow("draws", 64, 1024, None, draws) for draws in DRAWS),
        GpuRow("prefill", 64, 1024, 43_466), GpuRow("prefill", 16, 4096, 41_293), GpuRow("prefill", 4, 15_000, 34_814),
        GpuRow("prompt", 1, 1024, 28.8), GpuRow("prompt", 1, 4096, 102.3), GpuRow("mixed", MIXED_SEQUENCES, 0, 10_293),
    ),
    "0.6b": (
        GpuRow("decode", 1, 1024, 1.68), GpuRow("decode", 32, 1024, 2.60), GpuRow("decode", 128, 1024, 5.72),
        GpuRow("decode", 256, 1024, 9.98), GpuRow("decode", 32, 4096, 4.98), GpuRow("decode", 128, 4096, 15.55),
        GpuRow("prefill", 64, 1024, 406_112), GpuRow("prefill", 16, 4096, 355_349),
        GpuRow("prefill", 4, 15_000, 204_891), GpuRow("prompt", 1, 1024, 12.1), GpuRow("prompt", 1, 4096, 16.2),
        GpuRow("mixed", MIXED_SEQUENCES, 0, 24_354),
    ),
    # The peer's better result where it has two ways: a prompt of 1024 in a graph, linears of two libraries in fp8
    "30b-a3b": _short_rows({1: 4.19, 32: 15.86, 128: 20.82, 256: 26.39}, (71_965, 63_215), 29.1),
    "30b-a3b-fp8": _short_rows({1: 3.85, 32: 10.60, 128: 15.00, 256: 20.55}, (74_164, 64_564), 50.6),
    "8b-fp8": _short_rows({1: 3.50, 32: 5.31, 128: 8.99, 256: 15.78}, (68_413, 62_722), 21.0),
    "70b": _short_rows({1: None, 32: None, 128: None}, (None, None), None),  # on two GPUs or more
    "gpt-oss-20b": _short_rows({1: None, 32: None, 128: None, 256: None}, (None, None), None),
    "gpt-oss-120b": _short_rows({1: None, 8: None, 32: None, 128: None, 256: None}, (None, None), None),
    "qwen3.6-35b-a3b-fp8": _short_rows({1: None, 32: None, 128: None, 256: None}, (None, None), None),
    "qwen3-next-80b-fp8": _short_rows({1: None, 8: None, 32: None, 128: None, 256: None}, (None, None), None),
    "qwen3.8-27b-fp8": _short_rows({1: None, 32: None, 128: None, 256: None}, (None, None), None),
    "moonlight": _short_rows({1: None, 32: None, 128: None, 256: None}, (None, None), None),
    "glm-4.7-flash": _short_rows({1: None, 32: None, 128: None, 256: None}, (None, None), None),
    "mistral-small-4-fp8": _short_rows({1: None, 32: None, 128: None, 256: None}, (None, None), None),
    "deepseek-v3-5-layers": _short_rows({1: None, 32: None, 128: None, 256: None}, (None, None), None),  # on four GPUs
    "70b-fp8": _short_rows({1: None, 32: None, 128: None}, (None, None), None),
}  # fmt: skip
SHAPES = {name: Shape(name, CONFIGS[name], rows) for name, rows in _ROWS.items()}
# Rows of a shape at a degree of tensor parallelism, with the peer's figures
_ROWS_OF_RANKS: dict[tuple[str, int], tuple[GpuRow, ...]] = {
    ("8b", 2): (
        *_short_rows({1: 3.48, 32: 4.29, 128: 6.68, 256: 10.48}, (73_559, 69_931), 22.2),
        *(GpuRow("draws", 64, 1024, None, draws) for draws in DRAWS),
    )
}


def shape_of_ranks(name: str, num_ranks: int) -> Shape:
    """The shape with its rows at so many ranks. The peer's figures of one rank are left out at others."""
    shape = SHAPES[name]
    if num_ranks == 1:
        return shape
    rows = _ROWS_OF_RANKS.get((name, num_ranks)) or tuple(replace(row, peer=None) for row in shape.rows)
    return replace(shape, rows=rows)
