"""Profile of one GPU (or CPU) with PyTorch: matrix products, attention, memory, launches, optimizers, whole steps.

Each figure is the median of repeated runs on random inputs; on GPUs, a CUDA graph of them is replayed, which excludes
the time of the host. Operands rotate through buffers larger than the caches. Sections start with small sizes and stop
when their share of the time is used up. Times are in seconds, sizes in bytes or elements.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (PyTorch's own abbreviation)
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Row = dict[str, Any]
Call = Callable[[int], object]
#: minimum time in s of each run, of which the median is taken; maximum number of calls in a CUDA graph
LEAST, GRAPH = 0.006, 100


class Timer:
    """Times calls on a device; `is_over` reports the end of a section's time."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_gpu = device, device.type == "cuda"
        self.stream = torch.cuda.Stream() if self.is_gpu else None
        self.begin(0.0)

    def begin(self, seconds: float) -> None:
        """Begin a section of about `seconds`."""
        self.deadline, self.n_measured = time.perf_counter() + seconds, 0

    @property
    def is_over(self) -> bool:
        """Whether the section's time is over; at least one measurement is always made."""
        return self.n_measured > 0 and time.perf_counter() > self.deadline

    def wait(self) -> None:
        """Wait until the device has finished."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def once(self, run: Callable[[], object], repeats: int) -> float:
        """Return the time per run in s, over `repeats` consecutive runs."""
        self.wait()
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        self.wait()
        return (time.perf_counter() - begin) / repeats

    def median(self, call: Call, *, graph: bool = True) -> Row:
        """Return the median, minimum and maximum time of ``call(i)`` in s; `graph`: of calls in a CUDA graph."""
        self.n_measured += 1
        call(0)
        once = self.once(lambda: call(1), 1)
        if once > 0.3:
            return _row([once])
        n_calls = max(1, min(GRAPH, int(LEAST / once)))

        def several() -> None:
            for i in range(n_calls):
                call(i)

        run = (self._captured(several) if graph and self.is_gpu else None) or several
        repeats = max(1, min(50, int(LEAST / self.once(run, 1))))
        return _row([self.once(run, repeats) / n_calls for _ in range(5)])

    def _captured(self, run: Callable[[], object]) -> Callable[[], object] | None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            run()
            self.wait()
            try:  # torch.cuda.graph() would collect garbage on each use
                graph.capture_begin()
                try:
                    run()
                finally:
                    graph.capture_end()
            except RuntimeError:  # a call synchronises with the device
                torch.cuda.synchronize()
                return None
        replay: Callable[[], object] = graph.replay
        return replay


def _row(seconds: Sequence[float]) -> Row:
    return {"seconds": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}


def _n_buffers(nbytes: float) -> int:
    """Return the number of operands needed so that repeated calls do not find them in the cache."""
    return int(max(1, min(16, 256e6 // nbytes + 1)))


def measure_device(seconds: float, progress: Callable[[Mapping[str, Any]], None] = lambda _: None) -> dict[str, Any]:
    """Return a profile, measured in about `seconds`; `progress` is called with the results after each section."""
    timer = Timer(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    profile, end, shares = _about(timer), time.perf_counter() + seconds, 1.0
    for name, (section, share) in SECTIONS.items():
        start = time.perf_counter()
        timer.begin((end - start) * share / shares)
        shares -= share
        rows = profile[name] = []
        try:
            rows.extend(section(timer))  # rows before an error are kept
        except (RuntimeError, NotImplementedError) as error:  # such as insufficient memory
            rows.append(_failed(error))
        gc.collect()
        if timer.is_gpu:
            torch.cuda.empty_cache()
        profile["seconds"][name] = round(time.perf_counter() - start, 1)
        progress(profile)
    return profile


def _failed(error: Exception) -> Row:
    return {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}


def _about(timer: Timer) -> dict[str, Any]:
    """Return properties of the device reported by PyTorch and the system."""
    about: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "seconds": {}}
    if timer.is_gpu:
        got = torch.cuda.get_device_properties(0)
        about |= {"device": got.name, "memory_nbytes": got.total_memory, "multiprocessors": got.multi_processor_count}
        query = ["nvidia-smi", "--query-gpu=power.limit", "--format=csv,noheader,nounits", "--id=0"]
        try:
            answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
            return about | {"power_w": float(answer.stdout)}
        except (OSError, subprocess.SubprocessError, ValueError):  # another vendor's device
            return about
    nbytes, name = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), platform.processor() or platform.machine()
    return about | {"device": f"{name} CPU", "memory_nbytes": nbytes, "multiprocessors": torch.get_num_threads()}


def launches(timer: Timer) -> Iterator[Row]:
    """Measure the overhead of a kernel: on the host, in a chain, and within a CUDA graph."""
    x, inputs = torch.randn(64, device=timer.device), torch.randn(1, 64, device=timer.device)
    layer = nn.Linear(64, 64, device=timer.device)
    issued: dict[str, Callable[[], object]] = {
        "host time to issue one element-wise kernel": lambda: x.mul_(1.0),
        "host time of one linear layer under autograd, forward": lambda: layer(inputs),
        "host time of one linear layer under autograd, forward and backward": lambda: layer(inputs).sum().backward(),
    }
    for what, run in issued.items():
        seconds = []
        for _ in range(7):
            timer.wait()
            begin = time.perf_counter()
            for _ in range(200):
                run()
            seconds.append((time.perf_counter() - begin) / 200)
        yield {"what": what, **_row(seconds[2:])}
    yield {"what": "chain of element-wise kernels, per kernel", **timer.median(lambda _: x.mul_(1.0), graph=False)}
    if timer.is_gpu:
        yield {"what": "CUDA graph of element-wise kernels, per kernel", **timer.median(lambda _: x.mul_(1.0))}


def _shapes() -> Iterator[tuple[str, int, int, int]]:
    """Yield (purpose, m, n, k): squares, then the products of transformer layers split over tensor ranks."""
    yield from (("square", n, n, n) for n in (256, 512, 1024, 2048, 4096, 8192, 16384))
    yield from (("logits", 4096, vocabulary, 4096) for vocabulary in (32000, 50304, 128256))
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


PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}
#: name -> bytes per number of an operand
SCALED = {"fp8": 1.0, "mxfp8": 1.0, "nvfp4": 0.5}


def gemm(timer: Timer) -> Iterator[Row]:
    """Measure ``a (m, k) @ b (k, n)``; layout "nt" is a forward pass of a linear layer, "nn" and "tn" its backward."""
    lacking: set[str] = set() if timer.is_gpu else {"fp16", "tf32", *SCALED}
    for purpose, m, n, k in sorted(_shapes(), key=lambda shape: shape[1] * shape[2] * shape[3]):
        is_square = purpose == "square"
        is_usual = is_square or (m == 4096 and purpose.endswith("t1"))
        wanted = {
            "bf16": True,
            "fp16": is_usual,
            "tf32": is_usual,
            "fp32": is_square and n <= 8192,
            **dict.fromkeys(SCALED, (is_square or m in (4096, 8192)) and n % 128 == 0),
        }
        for name in [name for name, is_wanted in wanted.items() if is_wanted and name not in lacking]:
            if timer.is_over:
                return
            about = {"purpose": purpose, "m": m, "n": n, "k": k, "flops": 2.0 * m * n * k, "precision": name}
            torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
            for layout in ("nt", "nn", "tn") if name == "bf16" and (is_square or m == 4096) else ("nt",):
                try:
                    call = _scaled(timer, m, n, k, name) if name in SCALED else _plain(timer, m, n, k, name, layout)
                    call(0)
                except (RuntimeError, AttributeError, TypeError, ValueError, NotImplementedError) as error:
                    lacking.add(name)  # not supported by this PyTorch or GPU
                    yield about | _failed(error)
                    break
                yield {**about, "layout": layout, **timer.median(call)}
    torch.backends.cuda.matmul.allow_tf32 = False


def _plain(timer: Timer, m: int, n: int, k: int, name: str, layout: str) -> Call:
    options: dict[str, Any] = {"device": timer.device, "dtype": PLAIN[name]}
    out = torch.empty((m, n), **options)
    sets = range(_n_buffers(out.element_size() * (m * k + n * k + m * n)))
    a = [torch.randn((k, m), **options).t() if layout == "tn" else torch.randn((m, k), **options) for _ in sets]
    b = [torch.randn((n, k), **options).t() if layout == "nt" else torch.randn((k, n), **options) for _ in sets]
    return lambda i: torch.mm(a[i % len(a)], b[i % len(b)], out=out)


def _scaled(timer: Timer, m: int, n: int, k: int, name: str) -> Call:
    """Return a product of 8-bit or 4-bit numbers with bf16 result: scaled per tensor, or per block (MX, NV)."""

    def operand(rows: int) -> Tensor:
        if name == "nvfp4":
            pairs = torch.randint(0, 256, (rows, k // 2), device=timer.device, dtype=torch.uint8)
            return pairs.view(torch.float4_e2m1fn_x2)
        return torch.randn((rows, k), device=timer.device).to(torch.float8_e4m3fn)

    def scale(rows: int) -> Tensor:
        if name == "fp8":
            return torch.ones((), device=timer.device)
        block, dtype = (16, torch.float8_e4m3fn) if name == "nvfp4" else (32, torch.float8_e8m0fnu)
        n_scales = -(-rows // 128) * 128 * -(-k // block // 4) * 4  # in tiles of 128 x 4
        return torch.ones(n_scales, device=timer.device).to(dtype)

    sets = range(_n_buffers(SCALED[name] * (m * k + n * k) + 2 * m * n))
    a, b = [operand(m) for _ in sets], [operand(n).t() for _ in sets]
    how: dict[str, Any] = {
        "scale_a": scale(m),
        "scale_b": scale(n),
        "out_dtype": torch.bfloat16,
        "use_fast_accum": name == "fp8",
    }
    return lambda i: torch._scaled_mm(a[i % len(a)], b[i % len(b)], **how)


#: batch, heads, length, width of a head
ATTENTION = [
    (1, 4, 256, 64), (1, 4, 512, 128), (16, 16, 512, 64), (8, 12, 1024, 64), (8, 16, 1024, 64), (4, 16, 2048, 64),
    (1, 32, 2048, 128), (2, 32, 2048, 128), (4, 32, 2048, 128), (1, 8, 8192, 128), (1, 32, 4096, 128),
    (2, 32, 4096, 128), (2, 16, 8192, 64), (1, 32, 8192, 128), (1, 16, 16384, 128), (1, 8, 32768, 128),
]  # fmt: skip
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def attention(timer: Timer) -> Iterator[Row]:
    """Measure scaled dot-product attention with each backend, forward, and forward with backward.

    usual  the backend that PyTorch chooses by default
    """
    for batch, heads, length, width in ATTENTION:
        data = [torch.randn((batch, heads, length, width), device=timer.device, dtype=torch.bfloat16) for _ in range(4)]
        gradient, (q, k, v) = data[0], (x.requires_grad_() for x in data[1:])
        about = {"batch": batch, "heads": heads, "length": length, "head_width": width, "precision": "bf16"}
        about["usual"] = SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True)).name
        for causal in (True, False):
            flops = 4.0 * batch * heads * length * length * width * (0.5 if causal else 1.0)

            def forward(_: int, q: Tensor = q, k: Tensor = k, v: Tensor = v, causal: bool = causal) -> Tensor:
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

            def both(i: int, run: Any = forward, qkv: Any = (q, k, v), gradient: Tensor = gradient) -> object:
                return torch.autograd.grad(run(i), qkv, gradient)

            for name, backend in BACKENDS.items() if timer.is_gpu else [("flash", SDPBackend.FLASH_ATTENTION)]:
                if timer.is_over:
                    return
                about |= {"backend": name, "causal": causal}
                try:
                    with sdpa_kernel(backend):
                        with torch.no_grad():
                            yield {**about, "passes": "forward", "flops": flops, **timer.median(forward)}
                        yield {**about, "passes": "forward+backward", "flops": 3.5 * flops, **timer.median(both)}
                except RuntimeError as error:
                    yield about | _failed(error)


def memory_bound(timer: Timer) -> Iterator[Row]:
    """Measure element-wise kernels, normalisations and softmax of eager PyTorch; ``nbytes`` is the minimum traffic."""
    for n in (1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28):
        for precision, size in (("bf16", 2), ("fp32", 4)):
            if timer.is_over:
                return
            sets = range(_n_buffers(3 * size * n))
            x, y = ([torch.randn(n, device=timer.device).to(PLAIN[precision]) for _ in sets] for _ in range(2))
            for kernel, passes, call in _kernels(x, y):
                about = {"kernel": kernel, "precision": precision, "elements": n, "nbytes": passes * size * n}
                yield {**about, **timer.median(call)}


def _kernels(x: Sequence[Tensor], y: Sequence[Tensor]) -> list[tuple[str, float, Call]]:
    """Return name, minimum number of passes over a tensor, and call of each kernel; operands rotate."""
    sets, out, wide, size = len(x), torch.empty_like(x[0]), 4096, x[0].element_size()
    weight = torch.randn(wide, device=out.device).to(out.dtype)
    return [
        ("copy", 2, lambda i: out.copy_(x[i % sets])),
        ("add", 3, lambda i: torch.add(x[i % sets], y[i % sets], out=out)),
        ("gelu", 2, lambda i: F.gelu(x[i % sets])),
        ("silu-mul", 5, lambda i: F.silu(x[i % sets]) * y[i % sets]),  # two kernels
        ("dropout", 2 + 1 / size, lambda i: F.dropout(x[i % sets], 0.1)),  # and its mask
        ("layer-norm", 2, lambda i: F.layer_norm(x[i % sets].view(-1, wide), (wide,), weight, weight)),
        ("rms-norm", 2, lambda i: F.rms_norm(x[i % sets].view(-1, wide), (wide,), weight)),
        ("softmax", 2, lambda i: torch.softmax(x[i % sets].view(-1, wide), -1)),
    ]


def optimizers(timer: Timer) -> Iterator[Row]:
    """Measure an update of SGD with momentum and of AdamW over tensors of equal size, in fp32."""
    makes: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adamw": torch.optim.AdamW,
        "sgd-momentum": lambda parameters, **how: torch.optim.SGD(parameters, 0.1, 0.9, **how),
    }
    for n, parts in ((1 << 20, 16), (1 << 24, 64), (1 << 27, 148), (1 << 29, 200)):
        for name, make in makes.items():
            for how in ("fused", "foreach"):
                if timer.is_over:
                    return
                parameters = [nn.Parameter(torch.randn(n // parts, device=timer.device)) for _ in range(parts)]
                for parameter in parameters:
                    parameter.grad = torch.randn_like(parameter)
                rule = make(parameters, **{how: True})
                about = {"optimizer": name, "implementation": how, "parameters": n, "tensors": parts}

                def step(_: int, rule: torch.optim.Optimizer = rule) -> object:
                    return rule.step()

                yield {**about, "precision": "fp32", **timer.median(step, graph=False)}


def llama(layers: int, dim: int, hidden: int, heads: int, kv_heads: int, vocabulary: int) -> Any:
    """Return the modules of a language model as in models/llama.toml; :func:`loss` evaluates it."""
    shapes = ((dim, dim + 2 * kv_heads * dim // heads), (dim, dim), (dim, 2 * hidden), (hidden, dim))
    blocks = (
        nn.ModuleList([*(nn.Linear(*shape, bias=False) for shape in shapes), nn.RMSNorm(dim), nn.RMSNorm(dim)])
        for _ in range(layers)
    )
    ends = nn.ModuleList([nn.Embedding(vocabulary, dim), nn.RMSNorm(dim), nn.Linear(dim, vocabulary, bias=False)])
    return nn.ModuleDict({"ends": ends, "blocks": nn.ModuleList(blocks)})


def loss(model: Any, tokens: Tensor, heads: int) -> Tensor:
    """Return the loss of a batch, (batch, length) tokens, eager."""
    embedding, norm, logits = model["ends"]
    x = embedding(tokens)
    width = x.shape[-1] // heads
    angles = torch.outer(torch.arange(tokens.shape[1], device=x.device), torch.ones(width, device=x.device))
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def rotated(y: Tensor) -> Tensor:
        first, second = y.chunk(2, -1)
        return y * cosine + torch.cat((-second, first), -1) * sine

    for qkv, out, up, down, norm1, norm2 in model["blocks"]:
        y = qkv(norm1(x)).unflatten(-1, (-1, width)).transpose(1, 2)
        q, k, v = y.split([heads, (y.shape[1] - heads) // 2, (y.shape[1] - heads) // 2], 1)
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        x = x + out(y.transpose(1, 2).flatten(2))
        gate, y = up(norm2(x)).chunk(2, -1)
        x = x + down(F.silu(gate) * y)
    return F.cross_entropy(logits(norm(x)).flatten(0, 1), tokens.flatten())


#: layers, dim, hidden, heads, kv_heads, vocabulary; length, batches
LLAMAS: list[Any] = [
    (2, 128, 512, 2, 2, 1024, 128, (4,)),
    (12, 768, 2048, 12, 12, 32000, 1024, (1, 8, 32)),
    (24, 2048, 5504, 16, 16, 32000, 2048, (1, 2, 4, 8)),
    (4, 5120, 13824, 40, 40, 32000, 4096, (1, 2)),
    (4, 4096, 14336, 32, 8, 128256, 8192, (1,)),
]


def whole_steps(timer: Timer) -> Iterator[Row]:
    """Measure forward pass, backward pass and AdamW of whole models, all in bf16, to check sums of kernel times."""
    for *sizes, length, batches in LLAMAS if timer.is_gpu else LLAMAS[:1]:
        names = ("layers", "dim", "hidden", "heads", "kv_heads", "vocabulary", "seq")
        name = "+".join(f"{key}={value}" for key, value in zip(names, (*sizes, length), strict=True))
        about: Row = {"model": f"llama+{name}", "mode": "bf16", "optimizer": "adamw"}
        for batch in batches:
            if timer.is_over:
                return
            try:
                yield {**about, "batch": batch, **_step(timer, sizes, (batch, length))}
            except RuntimeError as error:  # insufficient memory
                yield {**about, "batch": batch, **_failed(error)}
            gc.collect()  # otherwise it counts in the next peak


def _step(timer: Timer, sizes: Sequence[int], shape: tuple[int, int]) -> Row:
    with torch.device(timer.device):
        model, tokens = llama(*sizes).to(torch.bfloat16), torch.randint(sizes[-1], shape)
    rule = torch.optim.AdamW(model.parameters(), fused=True)

    def step(_: int) -> None:
        loss(model, tokens, sizes[3]).backward()
        rule.step()
        rule.zero_grad(set_to_none=True)

    if timer.is_gpu:
        torch.cuda.reset_peak_memory_stats()
    measured = {"parameters": sum(tensor.numel() for tensor in model.parameters()), **timer.median(step, graph=False)}
    return measured | ({"peak_bytes": torch.cuda.max_memory_allocated()} if timer.is_gpu else {})


#: section -> (function that measures it, share of the time)
SECTIONS: dict[str, tuple[Callable[[Timer], Iterator[Row]], float]] = {
    "launch": (launches, 0.03),
    "gemm": (gemm, 0.35),
    "attention": (attention, 0.22),
    "memory": (memory_bound, 0.1),
    "optimizers": (optimizers, 0.05),
    "steps": (whole_steps, 0.25),
}
