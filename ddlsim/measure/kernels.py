"""Profile of one GPU (or the CPU) with PyTorch: products, attention, memory, launches, optimizers, whole steps.

Each figure is the median of repeated runs on random inputs; on GPUs a CUDA graph of them is replayed, so that the time
of the host does not count. Operands rotate through buffers larger than the caches. Sections measure small sizes first
and stop when their share of the time is over. Times are seconds, sizes bytes or elements.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (PyTorch's own abbreviation)
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Row = dict[str, Any]
Call = Callable[[int], object]
#: seconds that the groups of a measurement take together at least
LEAST = 0.03
#: kernels in a replayed graph at most
GRAPH = 100


class Timer:
    """Times calls on a device until `deadline` (of ``time.perf_counter``)."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_gpu, self.deadline = device, device.type == "cuda", 0.0

    @property
    def is_over(self) -> bool:
        """Return whether the time of this section is over."""
        return time.perf_counter() > self.deadline

    def wait(self) -> None:
        """Wait until the device has finished."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def once(self, run: Callable[[], object], repeats: int) -> float:
        """Return the seconds per call, over `repeats` calls in a row."""
        self.wait()
        begin = time.perf_counter()
        if self.is_gpu:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(repeats):
                run()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3 / repeats
        for _ in range(repeats):
            run()
        return (time.perf_counter() - begin) / repeats

    def median(self, call: Call, *, graph: bool = True) -> Row:
        """Return the median, least and most seconds of ``call(i)``.

        graph  replay a CUDA graph of several calls, where the device has such and the call can be captured
        """
        call(0)
        once = self.once(lambda: call(1), 1)
        if once > 0.3:
            return _row([once])
        n_calls = max(1, min(GRAPH, int(LEAST / 5 / max(once, 1e-6))))

        def several() -> None:
            for i in range(n_calls):
                call(i)

        run = (self._captured(several) if graph and self.is_gpu else None) or several
        seconds = self.once(run, 1) / n_calls
        repeats = max(1, min(50, int(LEAST / 5 / max(seconds * n_calls, 1e-6))))
        return _row([self.once(run, repeats) / n_calls for _ in range(5)])

    def _captured(self, run: Callable[[], object]) -> Callable[[], object] | None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            try:  # torch.cuda.graph() would collect garbage each time
                graph.capture_begin()
                try:
                    run()
                finally:
                    graph.capture_end()
            except RuntimeError:  # something in it waits for the device
                torch.cuda.synchronize()
                return None
        replay: Callable[[], object] = graph.replay
        return replay


def _row(seconds: Sequence[float]) -> Row:
    return {"seconds": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}


def _n_buffers(nbytes: float) -> int:
    """Return how many operands are needed so that repeated calls do not find them in the cache."""
    return int(max(1, min(16, 256e6 // max(nbytes, 1) + 1)))


def profile_device(seconds: float, progress: Callable[[Mapping[str, Any]], None] = lambda _: None) -> dict[str, Any]:
    """Measure everything in about `seconds`; `progress` gets the profile after each section."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    timer, measured, begin = Timer(device), about(device), time.perf_counter()
    shares = 1.0
    for name, (section, share) in SECTIONS.items():
        before = time.perf_counter()
        timer.deadline = before + (begin + seconds - before) * share / shares
        shares -= share
        try:
            measured[name] = list(section(timer))
        except (RuntimeError, NotImplementedError) as error:  # the other sections are worth having
            measured[name] = [{"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}]
        gc.collect()
        if timer.is_gpu:
            torch.cuda.empty_cache()
        measured["seconds"][name] = round(time.perf_counter() - before, 1)
        progress(measured)
    return measured


def about(device: torch.device) -> dict[str, Any]:
    """Return what PyTorch and the system say of a device."""
    told: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "seconds": {}}
    if device.type == "cpu":
        told |= {"device": _cpu_name(), "multiprocessors": torch.get_num_threads()}
        return told | {"memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    got = torch.cuda.get_device_properties(0)
    told |= {"device": got.name, "memory_nbytes": got.total_memory, "multiprocessors": got.multi_processor_count}
    told["capability"] = list(torch.cuda.get_device_capability(0))
    names = {"clock_rate": "clock_khz", "memory_clock_rate": "memory_clock_khz", "memory_bus_width": "bus_bits"}
    told |= {key: getattr(got, name) for name, key in names.items() if hasattr(got, name)}
    query = ["nvidia-smi", "--query-gpu=power.limit", "--format=csv,noheader,nounits", "--id=0"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout
        told["power_w"] = float(text.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        told["power_w"] = None
    return told


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


# ---------------------------------------------------------------- sections


def launches(timer: Timer) -> Iterator[Row]:
    """Measure what a kernel costs beside its work: on the host, in a chain, and within a CUDA graph."""
    x = torch.randn(64, device=timer.device)
    layer, inputs = nn.Linear(64, 64, device=timer.device), torch.randn(1, 64, device=timer.device)

    def host(run: Callable[[], object]) -> Row:
        seconds = []
        for _ in range(7):
            timer.wait()
            begin = time.perf_counter()
            for _ in range(200):
                run()
            seconds.append((time.perf_counter() - begin) / 200)
        return _row(seconds[2:])

    yield {"what": "host time to issue one element-wise kernel", **host(lambda: x.mul_(1.0))}
    with torch.no_grad():
        yield {"what": "host time to issue one linear layer", **host(lambda: layer(inputs))}
    yield {"what": "host time of one linear layer under autograd, forward", **host(lambda: layer(inputs))}
    both = host(lambda: layer(inputs).sum().backward())
    yield {"what": "host time of one linear layer under autograd, forward and backward", **both}
    yield {"what": "chain of element-wise kernels, per kernel", **timer.median(lambda _: x.mul_(1.0), graph=False)}
    if timer.is_gpu:
        yield {"what": "CUDA graph of element-wise kernels, per kernel", **timer.median(lambda _: x.mul_(1.0))}


def gemm_shapes() -> Iterator[tuple[str, int, int, int]]:
    """Yield (purpose, m, n, k): squares, then the products of transformer layers split over tensor ranks."""
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
    for vocabulary in (32000, 50304, 128256):
        yield "logits", 4096, vocabulary, 4096


#: name -> (bytes of an element, dtype, whether products use TF32)
PLAIN = {
    "bf16": (2, torch.bfloat16, False),
    "fp16": (2, torch.float16, False),
    "tf32": (4, torch.float32, True),
    "fp32": (4, torch.float32, False),
}
#: name -> bytes of an element
SCALED = {"fp8": 1.0, "mxfp8": 1.0, "nvfp4": 0.5}


def gemm(timer: Timer) -> Iterator[Row]:
    """Measure ``a (m, k) @ b (k, n)``; layout "nt" is a forward pass of a linear layer, "nn" and "tn" its backward."""
    lacking: set[str] = set()
    for purpose, m, n, k in sorted(gemm_shapes(), key=lambda shape: shape[1] * shape[2] * shape[3]):
        if timer.is_over:
            return
        about = {"purpose": purpose, "m": m, "n": n, "k": k, "flops": 2.0 * m * n * k}
        is_usual = purpose == "square" or (m == 4096 and purpose.endswith("t1"))
        for name, (size, dtype, tf32) in PLAIN.items():
            if (not timer.is_gpu and name in ("fp16", "tf32")) or (name != "bf16" and not is_usual):
                continue
            if name == "fp32" and (purpose != "square" or n > 8192):
                continue
            torch.backends.cuda.matmul.allow_tf32 = tf32
            for layout in ("nt", "nn", "tn") if name == "bf16" and (is_usual or m == 4096) else ("nt",):
                call = _product(timer, m, n, k, size, dtype, layout)
                yield {**about, "precision": name, "layout": layout, **timer.median(call)}
        torch.backends.cuda.matmul.allow_tf32 = False
        if not timer.is_gpu or not (purpose == "square" or m in (4096, 8192)) or n % 128:
            continue
        for name in [name for name in SCALED if name not in lacking]:
            try:
                call = _scaled_product(timer, m, n, k, name)
                call(0)
            except (RuntimeError, AttributeError, TypeError, ValueError, NotImplementedError) as error:
                lacking.add(name)  # PyTorch or the GPU cannot
                yield {"precision": name, "error": str(error).splitlines()[0][:200]}
                continue
            yield {**about, "precision": name, "layout": "nt", **timer.median(call)}


def _product(timer: Timer, m: int, n: int, k: int, size: int, dtype: torch.dtype, layout: str) -> Call:
    sets, made = _n_buffers(size * (m * k + n * k + m * n)), {"device": timer.device, "dtype": dtype}
    left = [torch.randn((k, m) if layout == "tn" else (m, k), **made) for _ in range(sets)]
    right = [torch.randn((n, k) if layout == "nt" else (k, n), **made) for _ in range(sets)]
    a = [x.t() if layout == "tn" else x for x in left]
    b = [x.t() if layout == "nt" else x for x in right]
    out = torch.empty((m, n), **made)
    return lambda i: torch.mm(a[i % sets], b[i % sets], out=out)


def _scaled_product(timer: Timer, m: int, n: int, k: int, name: str) -> Call:
    """Return a product of 8-bit or 4-bit numbers that gives bf16: scaled per tensor, or per block as MX and NV do."""
    sets = _n_buffers(SCALED[name] * (m * k + n * k) + 2 * m * n)
    one = torch.ones((), device=timer.device)

    def operand(rows: int) -> Tensor:
        if name == "nvfp4":
            whole = torch.randint(0, 256, (rows, k // 2), device=timer.device, dtype=torch.uint8)
            return whole.view(torch.float4_e2m1fn_x2)
        return torch.randn((rows, k), device=timer.device).to(torch.float8_e4m3fn)

    def scale(rows: int) -> Tensor:
        if name == "fp8":
            return one
        block, dtype = (16, torch.float8_e4m3fn) if name == "nvfp4" else (32, torch.float8_e8m0fnu)
        n_scales = -(-rows // 128) * 128 * -(-k // block // 4) * 4  # tiles of 128 x 4 scales, padded
        return torch.ones(n_scales, device=timer.device).to(dtype)

    a, b = [operand(m) for _ in range(sets)], [operand(n) for _ in range(sets)]
    scales = {"scale_a": scale(m), "scale_b": scale(n)}
    fast = name == "fp8"

    def call(i: int) -> Tensor:
        return torch._scaled_mm(
            a[i % sets], b[i % sets].t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    return call


#: batch, heads, length, width of a head
ATTENTION = [
    (1, 4, 256, 64), (1, 4, 512, 128), (1, 8, 1024, 128), (16, 16, 512, 64), (8, 12, 1024, 64), (8, 16, 1024, 64), (4, 16, 2048, 64), (1, 32, 2048, 128), (2, 32, 2048, 128),
    (4, 32, 2048, 128), (1, 8, 8192, 128), (1, 32, 4096, 128), (2, 32, 4096, 128), (2, 16, 8192, 64), (1, 32, 8192, 128),
    (1, 16, 16384, 128), (1, 8, 32768, 128),
]  # fmt: skip
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def attention(timer: Timer) -> Iterator[Row]:
    """Measure scaled dot-product attention by each backend, forward, and forward with backward."""
    for batch, heads, length, width in ATTENTION:
        shape = (batch, heads, length, width)
        made = {"device": timer.device, "dtype": torch.bfloat16}
        q, k, v = (torch.randn(shape, requires_grad=True, **made) for _ in range(3))
        gradient = torch.randn(shape, **made)
        usual = SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True)).name
        for causal in (True, False):
            for name, backend in BACKENDS.items():
                if timer.is_over:
                    return
                if (name == "math" and batch * heads * length * length > 6e8) or (
                    not timer.is_gpu and name in ("cudnn", "efficient")
                ):
                    continue
                about = {"backend": name, "batch": batch, "heads": heads, "length": length, "head_width": width}
                about |= {"causal": causal, "precision": "bf16", "usual": usual}

                def forward(_: int, q=q, k=k, v=v, causal=causal) -> Tensor:  # type: ignore[no-untyped-def]
                    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

                def both(i: int, forward=forward, qkv=(q, k, v), g=gradient) -> object:  # type: ignore[no-untyped-def]
                    return torch.autograd.grad(forward(i), qkv, g)

                flops = 4.0 * batch * heads * length * length * width * (0.5 if causal else 1.0)
                try:
                    with sdpa_kernel(backend):
                        with torch.no_grad():
                            yield {**about, "passes": "forward", "flops": flops, **timer.median(forward)}
                        passes = {"passes": "forward+backward", "flops": 3.5 * flops}
                        yield {**about, **passes, **timer.median(both)}
                except RuntimeError as error:
                    yield {**about, "error": str(error).splitlines()[0][:200]}


def memory_bound(timer: Timer) -> Iterator[Row]:
    """Measure element-wise kernels, normalisations and softmax of eager PyTorch; ``nbytes`` is the least traffic."""
    for n in (1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28):
        for name, dtype, size in (("bf16", torch.bfloat16, 2), ("fp32", torch.float32, 4)):
            if timer.is_over:
                return
            sets = _n_buffers(3 * size * n)
            x, y = ([torch.randn(n, device=timer.device).to(dtype) for _ in range(sets)] for _ in range(2))
            for kernel, passes, call in _kernels(x, y):
                about = {"kernel": kernel, "precision": name, "elements": n, "nbytes": passes * size * n}
                yield {**about, **timer.median(call)}


def _kernels(x: list[Tensor], y: list[Tensor]) -> list[tuple[str, float, Call]]:
    """Return name, passes over a tensor (at least) and call of each kernel, over operands that rotate."""
    sets, out, wide = len(x), torch.empty_like(x[0]), 4096
    weight = torch.randn(wide, device=out.device).to(out.dtype)
    calls: list[tuple[str, float, Call]] = [
        ("copy", 2, lambda i: out.copy_(x[i % sets])),
        ("add", 3, lambda i: torch.add(x[i % sets], y[i % sets], out=out)),
        ("gelu", 2, lambda i: F.gelu(x[i % sets])),
        ("silu-mul", 5, lambda i: F.silu(x[i % sets]) * y[i % sets]),  # two kernels
        ("dropout", 2.5 if out.element_size() == 2 else 2.25, lambda i: F.dropout(x[i % sets], 0.1)),  # and its mask
        ("layer-norm", 2, lambda i: F.layer_norm(x[i % sets].view(-1, wide), (wide,), weight, weight)),
        ("rms-norm", 2, lambda i: F.rms_norm(x[i % sets].view(-1, wide), (wide,), weight)),
        ("softmax", 2, lambda i: torch.softmax(x[i % sets].view(-1, wide), -1)),
    ]
    return [*calls, ("to-fp32", 3, lambda i: x[i % sets].float())] if out.element_size() == 2 else calls


def optimizers(timer: Timer) -> Iterator[Row]:
    """Measure an update of SGD with momentum and of AdamW over tensors of equal size, in fp32."""
    makes: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adamw": torch.optim.AdamW,
        "sgd-momentum": lambda p, **how: torch.optim.SGD(p, 0.1, 0.9, **how),
    }
    for n, parts in ((1 << 20, 16), (1 << 24, 64), (1 << 27, 148), (1 << 29, 200)):
        for name, make in makes.items():
            for how in ("fused", "foreach"):
                if timer.is_over:
                    return
                parameters = [nn.Parameter(torch.randn(n // parts, device=timer.device)) for _ in range(parts)]
                for p in parameters:
                    p.grad = torch.randn_like(p)
                step = make(parameters, **{how: True}).step
                about = {"optimizer": name, "implementation": how, "parameters": n, "tensors": parts}
                yield {**about, "precision": "fp32", **timer.median(lambda _, step=step: step(), graph=False)}


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
        """Return the block's output, (batch, length, hidden)."""
        batch, length, hidden = x.shape
        sizes = [self.heads * self.width, self.kv_heads * self.width, self.kv_heads * self.width]
        parts = self.qkv(self.norm1(x)).split(sizes, -1)
        q, k, v = (part.view(batch, length, -1, self.width).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, hidden))
        y = self.up(self.norm2(x))
        if not self.llama:
            return x + self.down(F.gelu(y, approximate="tanh"))
        gate, y = y.chunk(2, -1)
        return x + self.down(F.silu(gate) * y)


class Decoder(nn.Module):
    """Token embedding, blocks, final norm, logits and their cross-entropy."""

    def __init__(self, layers: int, vocabulary: int, block: tuple[int, int, int, int, bool]) -> None:
        super().__init__()
        hidden, llama = block[0], block[-1]
        self.embedding, self.logits = nn.Embedding(vocabulary, hidden), nn.Linear(hidden, vocabulary, bias=False)
        self.blocks = nn.ModuleList(Block(*block) for _ in range(layers))
        self.norm = (nn.RMSNorm if llama else nn.LayerNorm)(hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of a batch, (batch, length) tokens."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.logits(self.norm(x)).flatten(0, 1), tokens.flatten())


#: name -> layers, vocabulary, (hidden, heads, key/value heads, inner width, whether Llama's), length, micro-batches
DECODERS = {
    "gpt-tiny": (2, 1024, (128, 2, 2, 512, False), 128, (4,)),
    "gpt2-small": (12, 50304, (768, 12, 12, 3072, False), 1024, (1, 8, 32)),
    "gpt-1.3b": (24, 50304, (2048, 16, 16, 8192, False), 2048, (1, 4, 8)),
    "gpt3-13b, 4 of 40 layers": (4, 50304, (5120, 40, 40, 20480, False), 2048, (1, 4)),
    "llama-3-8b, 4 of 32 layers": (4, 128256, (4096, 32, 8, 14336, True), 8192, (1,)),
}


def whole_steps(timer: Timer) -> Iterator[Row]:
    """Measure forward pass, backward pass and AdamW of whole models, eager: a check of what the kernels add up to."""
    for name, (layers, vocabulary, block, length, batches) in DECODERS.items():
        for mode in ("bf16", "amp"):
            if timer.is_over or (not timer.is_gpu and name != "gpt-tiny"):
                return
            torch.manual_seed(0)
            about = {"model": name, "mode": mode, "layers": layers, "hidden": block[0], "length": length}
            try:
                with torch.device(timer.device):
                    model: nn.Module = Decoder(layers, vocabulary, block)
                model = model.to(torch.bfloat16) if mode == "bf16" else model
                optimizer = torch.optim.AdamW(model.parameters(), fused=True)
                for batch in batches:
                    tokens = torch.randint(vocabulary, (batch, length), device=timer.device)

                    def step(_: int, model=model, tokens=tokens, optimizer=optimizer, amp=mode == "amp") -> None:  # type: ignore[no-untyped-def]
                        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=amp):
                            loss = model(tokens)
                        loss.backward()
                        optimizer.step()
                        optimizer.zero_grad(set_to_none=True)

                    if timer.is_gpu:
                        torch.cuda.reset_peak_memory_stats()
                    seconds = timer.median(step, graph=False)
                    peak = torch.cuda.max_memory_allocated() if timer.is_gpu else None
                    yield {**about, "batch": batch, "optimizer": "adamw", **seconds, "peak_bytes": peak}
            except RuntimeError as error:  # no memory for it
                yield {**about, "error": str(error).splitlines()[0][:200]}
            model = optimizer = step = None  # type: ignore[assignment]  # or they count in the next peak
            gc.collect()


#: section -> (what measures it, its share of the time)
SECTIONS: dict[str, tuple[Callable[[Timer], Iterator[Row]], float]] = {
    "launch": (launches, 0.03),
    "gemm": (gemm, 0.35),
    "attention": (attention, 0.22),
    "memory": (memory_bound, 0.1),
    "optimizers": (optimizers, 0.05),
    "steps": (whole_steps, 0.25),
}
