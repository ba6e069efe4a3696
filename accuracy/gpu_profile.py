"""Profile one GPU with PyTorch: matrix products, attention, memory-bound kernels, launches, optimizers and whole steps.

    python accuracy/gpu_profile.py --out profile.json [--seconds 300] [--only gemm,steps] [--tiny]

Needs only torch (torchvision adds ResNet-50). Each figure is the median of repeated runs on random inputs, timed by the
device's events after warming up; operands rotate through buffers larger than the L2 cache. The file is rewritten after
each section, so an interrupted profile keeps what it has measured. Times are seconds, sizes bytes or elements.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (PyTorch's own abbreviation)
from torch import Tensor, nn

Rows = list[dict[str, Any]]


class Timer:
    """Times functions on one device."""

    def __init__(self, device: torch.device, min_seconds: float) -> None:
        self.device, self.min_seconds = device, min_seconds

    def synchronize(self) -> None:
        """Wait until the device has finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def once(self, run: Callable[[int], object], repeats: int) -> float:
        """Seconds per call of ``run(i)``, over `repeats` calls in a row."""
        if self.device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for i in range(repeats):
                run(i)
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3 / repeats
        begin = time.perf_counter()
        for i in range(repeats):
            run(i)
        return (time.perf_counter() - begin) / repeats

    def median(self, run: Callable[[int], object], groups: int = 5) -> dict[str, float]:
        """Median, minimum and maximum over groups of calls that together take at least ``min_seconds``."""
        for i in range(3):
            run(i)
        self.synchronize()
        guess = max(self.once(run, 2), 1e-7)
        repeats = max(1, min(2000, int(self.min_seconds / groups / guess)))
        seconds = [self.once(run, repeats) for _ in range(groups)]
        return {"seconds": statistics.median(seconds), "min": min(seconds), "max": max(seconds), "repeats": repeats}


def n_buffers(nbytes: float) -> int:
    """How many operand sets are needed so that repeated calls do not find them in the cache."""
    return int(max(1, min(16, 256e6 // max(nbytes, 1) + 1)))


def gemm_shapes(tiny: bool) -> Iterator[tuple[str, int, int, int]]:
    """(purpose, m, n, k): squares, then the products of transformer layers split over tensor ranks."""
    if tiny:
        yield "square", 64, 64, 64
        return
    for n in (256, 512, 1024, 2048, 4096, 8192, 16384):
        yield "square", n, n, n
    for tokens in (2048, 4096, 8192, 16384):
        for hidden in (1024, 2048, 4096, 5120, 8192, 12288):
            for tensor in (1, 2, 4, 8):
                if tokens in (2048, 16384) and (tensor in (2, 4) or hidden in (1024, 5120)):
                    continue
                yield f"mlp-up-t{tensor}", tokens, 4 * hidden // tensor, hidden
                yield f"mlp-down-t{tensor}", tokens, hidden, 4 * hidden // tensor
                if tokens == 4096:
                    yield f"qkv-t{tensor}", tokens, 3 * hidden // tensor, hidden
                    yield f"proj-t{tensor}", tokens, hidden, hidden // tensor
    for tokens in (128, 512, 1024):  # few tokens: one micro-batch of a short sequence
        for hidden in (4096, 8192):
            yield "mlp-up-t1", tokens, 4 * hidden, hidden
    yield "logits", 4096, 32000, 4096
    yield "logits", 4096, 50304, 4096
    yield "logits", 4096, 128256, 4096


def gemm(timer: Timer, tiny: bool) -> Rows:
    """Products ``a (m, k) @ b (k, n)``; layout "nt" is a forward pass of a linear layer, "nn" and "tn" its backward."""
    rows: Rows = []
    kinds: list[tuple[str, torch.dtype, bool]] = [
        ("bf16", torch.bfloat16, False),
        ("fp16", torch.float16, False),
        ("tf32", torch.float32, True),
        ("fp32", torch.float32, False),
    ]
    fp8 = getattr(torch, "float8_e4m3fn", None) if timer.device.type == "cuda" else None
    for purpose, m, n, k in gemm_shapes(tiny):
        flops = 2.0 * m * n * k
        for name, dtype, tf32 in kinds:
            square = purpose == "square"
            if name in ("fp16", "tf32") and not square and not (m == 4096 and purpose.endswith("t1")):
                continue
            if name == "fp32" and (not square or n > 8192):
                continue
            torch.backends.cuda.matmul.allow_tf32 = tf32
            size = torch.empty((), dtype=dtype).element_size()
            sets = n_buffers(size * (m * k + n * k + m * n))
            layouts = ("nt", "nn", "tn") if name == "bf16" and (square or m == 4096) else ("nt",)
            for layout in layouts:
                left = [
                    torch.randn((k, m) if layout == "tn" else (m, k), device=timer.device, dtype=dtype)
                    for _ in range(sets)
                ]
                right = [
                    torch.randn((n, k) if layout == "nt" else (k, n), device=timer.device, dtype=dtype)
                    for _ in range(sets)
                ]
                out = torch.empty((m, n), device=timer.device, dtype=dtype)
                a = [x.t() if layout == "tn" else x for x in left]
                b = [x.t() if layout == "nt" else x for x in right]
                rows.append(
                    {
                        "purpose": purpose,
                        "m": m,
                        "n": n,
                        "k": k,
                        "precision": name,
                        "layout": layout,
                        "flops": flops,
                        **timer.median(
                            lambda i, a=a, b=b, out=out, sets=sets: torch.mm(a[i % sets], b[i % sets], out=out)
                        ),
                    }
                )
                del left, right, a, b, out
        if fp8 is not None and (purpose == "square" or m in (4096, 8192)) and min(m, n, k) >= 256 and n % 16 == 0:
            sets = n_buffers(m * k + n * k + 2 * m * n)
            one = torch.ones((), device=timer.device)
            a8 = [torch.randn((m, k), device=timer.device).to(fp8) for _ in range(sets)]
            b8 = [torch.randn((n, k), device=timer.device).to(fp8) for _ in range(sets)]

            def scaled(
                i: int, a8: list[Tensor] = a8, b8: list[Tensor] = b8, sets: int = sets, one: Tensor = one
            ) -> Tensor:
                return torch._scaled_mm(
                    a8[i % sets],
                    b8[i % sets].t(),
                    scale_a=one,
                    scale_b=one,
                    out_dtype=torch.bfloat16,
                    use_fast_accum=True,
                )

            rows.append(
                {
                    "purpose": purpose,
                    "m": m,
                    "n": n,
                    "k": k,
                    "precision": "fp8",
                    "layout": "nt",
                    "flops": flops,
                    **timer.median(scaled),
                }
            )
            del a8, b8
    torch.backends.cuda.matmul.allow_tf32 = False
    return rows


def attention(timer: Timer, tiny: bool) -> Rows:
    """Scaled dot-product attention: fused by each backend, forward and forward with backward."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    rows: Rows = []
    shapes = (
        [(1, 2, 64, 16)]
        if tiny
        else [
            (8, 16, 1024, 64),
            (8, 12, 1024, 64),
            (16, 16, 512, 64),
            (4, 32, 2048, 128),
            (2, 32, 2048, 128),
            (1, 32, 2048, 128),
            (1, 32, 4096, 128),
            (2, 32, 4096, 128),
            (1, 32, 8192, 128),
            (1, 8, 8192, 128),
            (1, 4, 8192, 128),
            (1, 16, 16384, 128),
            (1, 8, 32768, 128),
        ]
    )
    backends = [("math", SDPBackend.MATH)]
    if timer.device.type == "cuda":
        backends = [
            ("flash", SDPBackend.FLASH_ATTENTION),
            ("cudnn", SDPBackend.CUDNN_ATTENTION),
            ("efficient", SDPBackend.EFFICIENT_ATTENTION),
            *backends,
        ]
    for batch, heads, length, width in shapes:
        for causal in (True, False):
            for name, backend in backends:
                if name == "math" and batch * heads * length * length > 1.5e9:
                    continue
                q, k, v = (
                    torch.randn(
                        (batch, heads, length, width), device=timer.device, dtype=torch.bfloat16, requires_grad=True
                    )
                    for _ in range(3)
                )
                flops = 4.0 * batch * heads * length * length * width * (0.5 if causal else 1.0)
                try:
                    with sdpa_kernel(backend):
                        gradient = torch.randn_like(q)

                        def forward(
                            _: int, q: Tensor = q, k: Tensor = k, v: Tensor = v, causal: bool = causal
                        ) -> Tensor:
                            with torch.no_grad():
                                return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

                        def both(
                            _: int,
                            q: Tensor = q,
                            k: Tensor = k,
                            v: Tensor = v,
                            causal: bool = causal,
                            g: Tensor = gradient,
                        ) -> None:
                            torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=causal), (q, k, v), g)

                        for passes, run, factor in (("forward", forward, 1.0), ("forward+backward", both, 3.5)):
                            rows.append(
                                {
                                    "backend": name,
                                    "batch": batch,
                                    "heads": heads,
                                    "length": length,
                                    "head_width": width,
                                    "causal": causal,
                                    "passes": passes,
                                    "precision": "bf16",
                                    "flops": flops * factor,
                                    **timer.median(run, groups=3),
                                }
                            )
                except RuntimeError as error:
                    rows.append(
                        {"backend": name, "length": length, "causal": causal, "error": str(error).splitlines()[0]}
                    )
    return rows


def kernel_calls(x: list[Tensor], y: list[Tensor]) -> list[tuple[str, int, Callable[[int], object]]]:
    """Name, passes over a tensor (at least) and call of each memory-bound kernel, over operands that rotate."""
    n, sets, out = x[0].numel(), len(x), torch.empty_like(x[0])
    wide = min(4096, n)
    weight = torch.randn(wide, device=out.device).to(out.dtype)
    return [
        ("copy", 2, lambda i: out.copy_(x[i % sets])),
        ("add", 3, lambda i: torch.add(x[i % sets], y[i % sets], out=out)),
        ("gelu", 2, lambda i: F.gelu(x[i % sets])),
        ("silu-mul", 3, lambda i: F.silu(x[i % sets]) * y[i % sets]),
        ("dropout", 2, lambda i: F.dropout(x[i % sets], 0.1)),
        ("layer-norm", 2, lambda i: F.layer_norm(x[i % sets].view(-1, wide), (wide,), weight, weight)),
        ("rms-norm", 2, lambda i: F.rms_norm(x[i % sets].view(-1, wide), (wide,), weight)),
        ("softmax", 2, lambda i: torch.softmax(x[i % sets].view(-1, wide), -1)),
        ("zero", 1, lambda i: x[i % sets].zero_()),
    ]


def memory_bound(timer: Timer, tiny: bool) -> Rows:
    """Element-wise kernels, normalisations and softmax of eager PyTorch; ``nbytes`` is the least traffic."""
    rows: Rows = []
    for n in (1 << 14,) if tiny else (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28):
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            size = 2 if name == "bf16" else 4
            sets = n_buffers(3 * size * n)
            x, y = ([torch.randn(n, device=timer.device).to(dtype) for _ in range(sets)] for _ in range(2))
            for kernel, passes, run in kernel_calls(x, y):
                rows.append({"kernel": kernel, "precision": name, "elements": n, "nbytes": passes * size * n})
                rows[-1] |= timer.median(run, groups=3)
            if name == "bf16":
                rows.append({"kernel": "to-fp32", "precision": name, "elements": n, "nbytes": 6 * n})
                rows[-1] |= timer.median(lambda i, x=x: x[i % len(x)].float(), groups=3)  # type: ignore[misc]
    return rows


def launches(timer: Timer, tiny: bool) -> Rows:
    """What a kernel costs beside its work: on the host, in a chain on the device, and within a CUDA graph."""
    rows: Rows = []
    x = torch.randn(64, device=timer.device)
    weight, bias = torch.randn(64, 64, device=timer.device), torch.randn(64, device=timer.device)
    n = 50 if tiny else 2000

    def host_seconds(run: Callable[[], object]) -> float:
        times = []
        for _ in range(5):
            timer.synchronize()
            begin = time.perf_counter()
            for _ in range(n // 10):
                run()
            times.append((time.perf_counter() - begin) / (n // 10))
            timer.synchronize()
        return statistics.median(times)

    rows.append({"what": "host time to issue one element-wise kernel", "seconds": host_seconds(lambda: x.mul_(1.0))})
    rows.append(
        {
            "what": "host time to issue one linear layer",
            "seconds": host_seconds(lambda: F.linear(x[None], weight, bias)),
        }
    )
    layer, inputs = nn.Linear(64, 64, device=timer.device), torch.randn(1, 64, device=timer.device)
    rows.append(
        {
            "what": "host time of one linear layer under autograd, forward",
            "seconds": host_seconds(lambda: layer(inputs)),
        }
    )
    rows.append(
        {
            "what": "host time of one linear layer under autograd, forward and backward",
            "seconds": host_seconds(lambda: layer(inputs).sum().backward()),
        }
    )
    rows.append({"what": "chain of element-wise kernels, per kernel", **timer.median(lambda _: x.mul_(1.0))})
    if timer.device.type == "cuda":
        for n_kernels in (10, 100, 1000):
            graph = torch.cuda.CUDAGraph()
            for _ in range(3):
                x.mul_(1.0)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                for _ in range(n_kernels):
                    x.mul_(1.0)
            measured = timer.median(lambda _, graph=graph: graph.replay())
            rows.append(
                {
                    "what": f"CUDA graph of {n_kernels} element-wise kernels, per kernel",
                    "seconds": measured["seconds"] / n_kernels,
                }
            )
        for nbytes in (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28):
            on_device = torch.empty(nbytes, dtype=torch.uint8, device=timer.device)
            for memory in ("pinned", "pageable"):
                on_host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=memory == "pinned")
                rows.append(
                    {
                        "what": f"copy host to device, {memory}",
                        "nbytes": nbytes,
                        **timer.median(lambda _, d=on_device, h=on_host: d.copy_(h, non_blocking=True), groups=3),
                    }
                )
                rows.append(
                    {
                        "what": f"copy device to host, {memory}",
                        "nbytes": nbytes,
                        **timer.median(lambda _, d=on_device, h=on_host: h.copy_(d, non_blocking=True), groups=3),
                    }
                )
    return rows


def optimizers(timer: Timer, tiny: bool) -> Rows:
    """One update of SGD with momentum and of AdamW, as PyTorch offers them, over tensors of equal size."""
    rows: Rows = []
    for n, parts in ((1 << 14, 4),) if tiny else ((1 << 20, 16), (1 << 24, 64), (1 << 27, 148), (1 << 29, 200)):
        for name, make in (
            ("adamw", torch.optim.AdamW),
            ("sgd-momentum", lambda p, **how: torch.optim.SGD(p, 0.1, 0.9, **how)),
        ):
            for how in ("fused", "foreach", "for-loop"):
                if (how == "for-loop" and n > 1 << 27) or (how == "fused" and timer.device.type != "cuda"):
                    continue
                parameters = [nn.Parameter(torch.randn(n // parts, device=timer.device)) for _ in range(parts)]
                for p in parameters:
                    p.grad = torch.randn_like(p)
                optimizer = make(parameters, **({"fused": True} if how == "fused" else {"foreach": how == "foreach"}))
                rows.append(
                    {
                        "optimizer": name,
                        "implementation": how,
                        "parameters": n,
                        "tensors": parts,
                        "precision": "fp32",
                        **timer.median(lambda _, o=optimizer: o.step(), groups=3),
                    }
                )
                del parameters, optimizer
    return rows


class Block(nn.Module):
    """A transformer block: GPT-2's (LayerNorm, GELU, biases) or Llama's (RMSNorm, SwiGLU, none)."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, inner: int, llama: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width, self.llama = heads, kv_heads, hidden // heads, llama
        norm = nn.RMSNorm if llama else nn.LayerNorm
        self.norm1, self.norm2 = norm(hidden), norm(hidden)
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * self.width, bias=not llama)
        self.proj = nn.Linear(hidden, hidden, bias=not llama)
        self.up = nn.Linear(hidden, inner * (2 if llama else 1), bias=not llama)
        self.down = nn.Linear(inner, hidden, bias=not llama)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(
            [self.heads * self.width, self.kv_heads * self.width, self.kv_heads * self.width], -1
        )
        q, k, v = (y.view(batch, length, -1, self.width).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, hidden))
        y = self.up(self.norm2(x))
        if self.llama:
            gate, y = y.chunk(2, -1)
            return x + self.down(F.silu(gate) * y)
        return x + self.down(F.gelu(y, approximate="tanh"))


class Transformer(nn.Module):
    """A decoder: token embedding, blocks, final norm, logits and their cross-entropy."""

    def __init__(
        self,
        layers: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        inner: int,
        vocabulary: int,
        llama: bool,
        recompute: bool,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, kv_heads, inner, llama) for _ in range(layers))
        self.norm = (nn.RMSNorm if llama else nn.LayerNorm)(hidden)
        self.logits = nn.Linear(hidden, vocabulary, bias=False)
        self.recompute = recompute

    def forward(self, tokens: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return F.cross_entropy(self.logits(self.norm(x)).flatten(0, 1), tokens.flatten())


# name, layers, hidden, heads, key/value heads, inner width, vocabulary, Llama's blocks, sequence length, micro-batches
TRANSFORMERS: list[tuple[str, int, int, int, int, int, int, bool, int, tuple[int, ...]]] = [
    ("gpt2-small", 12, 768, 12, 12, 3072, 50304, False, 1024, (1, 4, 8, 16, 32)),
    ("gpt2-medium", 24, 1024, 16, 16, 4096, 50304, False, 1024, (1, 4, 16)),
    ("gpt-1.3b", 24, 2048, 16, 16, 8192, 50304, False, 2048, (1, 2, 4, 8)),
    ("llama-3-8b, 4 of 32 layers", 4, 4096, 32, 8, 14336, 128256, True, 8192, (1,)),
    ("llama-2-7b, 8 of 32 layers", 8, 4096, 32, 32, 11008, 32000, True, 4096, (1, 2)),
    ("gpt3-13b, 4 of 40 layers", 4, 5120, 40, 40, 20480, 50304, False, 2048, (1, 2, 4)),
]


def whole_steps(timer: Timer, tiny: bool) -> Rows:
    """Forward, backward and AdamW of whole models: a check of what the kernels add up to, eager and compiled."""
    rows: Rows = []
    models = [("tiny", 2, 64, 2, 2, 128, 256, True, 32, (1, 2))] if tiny else TRANSFORMERS
    cuda = timer.device.type == "cuda"
    for name, layers, hidden, heads, kv_heads, inner, vocabulary, llama, length, batches in models:
        for mode in ("amp", "bf16", "bf16-recompute", "bf16-compiled"):
            if mode == "bf16-compiled" and (
                not cuda or name not in ("gpt2-small", "gpt-1.3b", "llama-3-8b, 4 of 32 layers")
            ):
                continue
            if mode == "bf16-recompute" and not tiny and hidden < 2048:
                continue
            torch.manual_seed(0)
            try:
                with torch.device(timer.device):
                    model: nn.Module = Transformer(
                        layers, hidden, heads, kv_heads, inner, vocabulary, llama, mode == "bf16-recompute"
                    )
                n_parameters = sum(p.numel() for p in model.parameters())
                model = model if mode == "amp" else model.to(torch.bfloat16)
                optimizer = torch.optim.AdamW(model.parameters(), fused=cuda)
                call = torch.compile(model) if mode == "bf16-compiled" else model
                for batch in batches if mode != "bf16-compiled" else batches[-1:]:
                    tokens = torch.randint(vocabulary, (batch, length), device=timer.device)
                    if cuda:
                        torch.cuda.reset_peak_memory_stats()

                    def passes(_: int, call: Any = call, tokens: Tensor = tokens, amp: bool = mode == "amp") -> None:
                        with torch.autocast(timer.device.type, torch.bfloat16, enabled=amp):
                            loss = call(tokens)
                        loss.backward()

                    def step(i: int, passes: Any = passes, optimizer: Any = optimizer) -> None:
                        passes(i)
                        optimizer.step()
                        optimizer.zero_grad(set_to_none=True)

                    measured = timer.median(step, groups=3)
                    rows.append(
                        {
                            "model": name,
                            "mode": mode,
                            "layers": layers,
                            "hidden": hidden,
                            "length": length,
                            "batch": batch,
                            "parameters": n_parameters,
                            "optimizer": "adamw",
                            **measured,
                            "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
                            "tokens_per_second": batch * length / measured["seconds"],
                        }
                    )
            except RuntimeError as error:
                rows.append({"model": name, "mode": mode, "error": str(error).splitlines()[0]})
            model = optimizer = call = passes = step = None  # type: ignore[assignment]  # or they count in the next peak
            if cuda:
                gc.collect()
                torch.cuda.empty_cache()
    rows += convolutional_steps(timer, tiny)
    return rows


def convolutional_steps(timer: Timer, tiny: bool) -> Rows:
    """ResNet-50 (where torchvision is installed): SGD with momentum, channels last, three precisions."""
    try:
        from torchvision.models import resnet50
    except Exception:  # torchvision is optional, and builds that do not match torch fail in many ways
        return []
    rows: Rows = []
    cuda = timer.device.type == "cuda"
    for precision in ("fp32",) if tiny else ("amp-bf16", "tf32", "fp32"):
        for batch in (2,) if tiny else (1, 8, 32, 64, 128, 256):
            if precision == "fp32" and batch not in (2, 32, 128):
                continue
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "fp32"
            model = resnet50().to(timer.device, memory_format=torch.channels_last)
            optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
            x = torch.randn(batch, 3, 224, 224, device=timer.device).to(memory_format=torch.channels_last)
            y = torch.randint(1000, (batch,), device=timer.device)
            if cuda:
                torch.cuda.reset_peak_memory_stats()

            def step(
                _: int,
                model: Any = model,
                x: Tensor = x,
                y: Tensor = y,
                o: Any = optimizer,
                amp: bool = precision == "amp-bf16",
            ) -> None:
                with torch.autocast(timer.device.type, torch.bfloat16, enabled=amp):
                    loss = F.cross_entropy(model(x), y)
                loss.backward()
                o.step()
                o.zero_grad(set_to_none=True)

            measured = timer.median(step, groups=3)
            rows.append(
                {
                    "model": "resnet50",
                    "mode": precision,
                    "batch": batch,
                    "optimizer": "sgd-momentum",
                    **measured,
                    "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
                    "samples_per_second": batch / measured["seconds"],
                }
            )
            del model, optimizer, step
    return rows


SECTIONS = {
    "launch": launches,
    "steps": whole_steps,
    "gemm": gemm,
    "attention": attention,
    "memory": memory_bound,
    "optimizers": optimizers,
}


def main() -> None:
    """Measure all sections, or those of ``--only``, until ``--seconds`` have passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="profile.json")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--tiny", action="store_true", help="small sizes: shows that it works")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    timer = Timer(device, 0.002 if given.tiny else 0.04)
    properties = torch.cuda.get_device_properties(0) if device.type == "cuda" else None
    profile: dict[str, Any] = {
        "device": properties.name if properties else platform.processor() or platform.machine(),
        "memory": properties.total_memory if properties else None,
        "multiprocessors": properties.multi_processor_count if properties else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "seconds": {},
    }
    begin = time.perf_counter()
    for section in given.only.split(","):
        if time.perf_counter() - begin > given.seconds:
            profile.setdefault("left_out", []).append(section)
            continue
        before = time.perf_counter()
        try:
            profile[section] = SECTIONS[section](timer, given.tiny)
        except Exception as error:  # the other sections are worth having
            profile[section] = [{"error": f"{type(error).__name__}: {error}"}]
        profile["seconds"][section] = round(time.perf_counter() - before, 1)
        Path(given.out).write_text(json.dumps(profile), encoding="utf-8")
        print(section, profile["seconds"][section], "s", len(profile[section]), "rows", flush=True)


if __name__ == "__main__":
    main()
