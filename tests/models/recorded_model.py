"""A small model that writes down its kernel calls, each with its arguments by name."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.shapes import CONFIGS
from pd_cluster.models.forward_inputs import ForwardInputs, Tail
from pd_cluster.models.registry import build_model, resolve_spec
from pd_cluster.models.weights import fill_at_random
from pd_kernels.attention import AttentionShape
from pd_kernels.backends import TORCH, Kernels
from pd_kernels.torch_attention import TorchAttention
from pd_kernels.values import KeysValues, NewTokens, PackedSequences
from tests.worker.test_few_rows import FEW_ROWS, PlainFewRows

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_kernels.attention import AttentionPlan
    from pd_kernels.gemm_selection import Product
    from pd_kernels.values import HalfNormed

BLOCK = 16
RECORDED = (
    "rms_norm", "add_rms_norm", "silu_and_mul", "norm_rope_write", "quantize", "quantized_product",
    "add_rms_norm_quantized", "silu_and_mul_quantized", "route",
)  # fmt: skip
QWEN3 = {
    **CONFIGS["tiny"], "architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "sliding_window": 5,
    "max_window_layers": 1, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA3 = {
    **CONFIGS["tiny"], "architectures": ["Gemma3ForCausalLM"], "sliding_window": 5, "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 25, "rope_theta": 1e6,
}  # fmt: skip
GPT_OSS = {
    **CONFIGS["tiny"], "architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2,
    "sliding_window": 5, "tie_word_embeddings": False, "quantization_config": {"quant_method": "mxfp4"},
    "attention_bias": True,
}  # fmt: skip
FLOAT8 = {**CONFIGS["tiny"], "quantization_config": {"quant_method": "fp8"}}
SHAPES = {
    "llama": {**CONFIGS["tiny"], "attention_bias": True, "mlp_bias": True}, "qwen3": QWEN3, "gemma3": GEMMA3,
    "float8": FLOAT8, "gpt-oss": GPT_OSS,
}  # fmt: skip
KERNELS = {"usual": TORCH, "few-rows": FEW_ROWS}


@dataclass
class Recorder:
    """Lines such as `rms_norm(t0[3, 64], model.norm.weight, 1e-05) -> t1[3, 64]`; one name per tensor's storage."""

    lines: list[str] = field(default_factory=list)
    _names: dict[int, str] = field(default_factory=dict)
    _kept: list[torch.Tensor] = field(default_factory=list)  # so that no address is used twice
    _is_nested: bool = False

    def name(self, text: str, tensor: torch.Tensor) -> None:
        """Use `text` for this tensor, unless its storage has a name."""
        self._names.setdefault(tensor.untyped_storage().data_ptr(), text)
        self._kept.append(tensor)

    def forget(self) -> None:
        """Start anew with the unnamed tensors, for another step."""
        self._names = {key: name for key, name in self._names.items() if not name.startswith("t%")}

    def note(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`; calls of it are written down, but not those that it makes in turn."""

        def called(*args: Any, **kwargs: Any) -> Any:
            if self._is_nested:
                return function(*args, **kwargs)
            values = [(value if isinstance(value, KeysValues | NewTokens) else [value]) for value in args]
            before = ", ".join(self._text(value) for value in (*chain(*values), *kwargs.values()))
            self._is_nested = True
            try:
                result = function(*args, **kwargs)
            finally:
                self._is_nested = False
            self.lines.append(f"{name}({before}) -> {self._text(result)}")
            return result

        return called

    def kernels(self, kernels: Kernels) -> Kernels:
        """The same functions, recorded; products of few rows too."""

        def few_rows(weight: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> RecordedFewRows | None:
            product = kernels.few_rows(weight, bias, gated)
            return None if product is None else RecordedFewRows(weight, bias, gated, recorder=self)

        found = {name: self.note(name, getattr(kernels, name)) for name in RECORDED}
        return replace(kernels, few_rows=few_rows, **found)  # type: ignore[arg-type]

    def _text(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            key = value.untyped_storage().data_ptr()
            if key not in self._names:
                self._names[key] = f"t%{sum(name.startswith('t%') for name in self._names.values())}"
                self._kept.append(value)
            return f"{self._names[key]}{list(value.shape)}"
        if isinstance(value, tuple):
            return f"({', '.join(self._text(part) for part in value)})"
        if hasattr(value, "__dataclass_fields__"):
            return f"{type(value).__name__}({', '.join(self._text(getattr(value, f.name)) for f in fields(value))})"
        return str(value)


@dataclass(frozen=True)
class RecordedFewRows(PlainFewRows):
    """Products of few rows that write down their calls."""

    recorder: Recorder = field(default_factory=Recorder)

    def __call__(self, x: torch.Tensor | HalfNormed) -> torch.Tensor:
        result: torch.Tensor = self.recorder.note("few_rows", lambda x, weight, bias, gated: super_call(self, x))(
            x, self.weight, self.bias, self.gated
        )
        return result

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, norm: torch.Tensor, eps: float) -> HalfNormed:
        def add(residual: torch.Tensor, x: torch.Tensor, norm: torch.Tensor, eps: float, *rest: object) -> HalfNormed:
            return PlainFewRows.add_to(self, residual, x, norm, eps)

        result: HalfNormed = self.recorder.note("few_rows.add_to", add)(residual, x, norm, eps, self.weight, self.bias)
        return result


def super_call(product: PlainFewRows, x: torch.Tensor | HalfNormed) -> torch.Tensor:
    """PlainFewRows' own product."""
    return PlainFewRows.__call__(product, x)


@dataclass(frozen=True)
class RecordedPlan:
    """An attention plan that writes down its runs."""

    name: str
    plan: AttentionPlan
    recorder: Recorder

    def run(
        self,
        query: torch.Tensor,
        cache: KeysValues,
        scale: float,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        given = {} if sinks is None else {"sinks": sinks}
        result: torch.Tensor = self.recorder.note(self.name, self.plan.run)(query, cache, scale, **given)
        return result

    @property
    def may_rotate(self) -> bool:
        return False

    def run_rotating(
        self, heads: torch.Tensor, new: NewTokens, cache: KeysValues, scale: float, sinks: torch.Tensor | None = None
    ) -> None:
        """Always None."""


class RecordedModel:
    """One model in float64, which no CPU packs, over a cache of noise."""

    def __init__(self, shape: str, kernels: Kernels) -> None:
        self.recorder = Recorder()
        self.spec = resolve_spec(Path(), SHAPES[shape])
        recorded = self.recorder.kernels(kernels)
        self.model = build_model(self.spec, recorded, 128, torch.float64, torch.device("cpu"))
        for name, slot in self.model.slots.items():
            self.recorder.name(name, slot.tensor)
        fill_at_random(self.model, seed=1)
        self.model.finish_loading()
        spec = self.spec
        cache_shape = (8, spec.num_kv_heads, spec.num_layers, 2, BLOCK, spec.head_dim)
        cache = torch.randn(cache_shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        self.recorder.name("cache", cache)
        self.caches = {
            layer: KeysValues(cache[:, :, layer, 0], cache[:, :, layer, 1]) for layer in range(spec.num_layers)
        }

    @torch.inference_mode()
    def step(self, count: int, rows: list[int] | None, *, plans_tail: bool = True) -> torch.Tensor:
        """Logits of `count` sequences of one token each after three; of `rows` of them, if given."""
        lengths = np.full(count, 4)

        def plan(rows: list[int], window: int, name: str) -> RecordedPlan:
            packed = PackedSequences(
                num_decodes=len(rows),
                query_starts=torch.arange(len(rows) + 1, dtype=torch.int32),
                seq_lens=torch.from_numpy(lengths[rows].astype(np.int32)),
                block_tables=torch.tensor(rows, dtype=torch.int32)[:, None],
                host_query_lens=np.ones(len(rows), np.int64),
                host_seq_lens=lengths[rows],
            )
            shape = AttentionShape(
                self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_dim, BLOCK, self.spec.num_layers,
                torch.float64, window, has_sinks=self.spec.has_sinks,
            )  # fmt: skip
            inner = TorchAttention(shape).plan(packed)
            return RecordedPlan(f"attention.{name}.window={window}", inner, self.recorder)

        tail = None
        if rows is not None:
            tail_plan = plan(rows, self.spec.windows[-1], "tail") if plans_tail else None
            tail = Tail(torch.tensor(rows, dtype=torch.int64), tail_plan)
        inputs = ForwardInputs(
            token_ids=torch.arange(count) + 7,
            positions=torch.from_numpy(lengths) - 1,
            slot_mappings=[torch.arange(count) * BLOCK + 3] * len(self.spec.group_windows),
            plans=[plan(list(range(count)), window, "all") for window in self.spec.group_windows],
            tail=tail,
        )
        self.recorder.name("slot_mapping", inputs.slot_mappings[0])
        self.recorder.name("positions", inputs.positions)
        logits = self.model.forward(inputs, self.caches)
        self.recorder.lines.append(f"logits {self.recorder._text(logits)}")
        self.recorder.forget()
        return logits

    def choose_products(self) -> int:
        """Of steps of 2 and 8 decodes and 8 and 30 tokens: each proposal is a way that is as fast as the usual one."""

        def propose(num_rows: int, weight: torch.Tensor, parts: int = 1) -> list[Product]:
            self.recorder.lines.append(f"propose {num_rows} rows by {list(weight.shape)} in {parts} parts")
            return [] if parts > 1 else [lambda x, weight: F.linear(x, weight)]

        def measure(run: Callable[[], None]) -> float:
            run()
            return 1.0

        return self.model.choose_products([2, 8], [2, 8, 30], propose, measure)
