"""Times PyTorch, transformers and MLX on the CPU for `mlxtape bench ops --peers`.

Reads one request a line, {"op", "form", "pass", "shape", "dtype", "seconds", "threads"}, and answers
with one line, {"torch": [us, ...], "mlx": [us, ...]}: the libraries that can be imported and have
the operation. Inputs are made once per row and kept while the same row is asked for again. A
backward is timed alone: its forward ran before.
"""

import json
import sys
import time

try:
    import torch
    from torch_ops import EagerExperts, Qwen3NextConfig, TorchOps, TransformersOps
except ImportError:
    torch = None
try:
    import mlx.core as mx
    import mlx.nn as mlx_nn

    mx.set_default_device(mx.cpu)
except ImportError:
    mx = None

EPS = 1e-6


def on_cpu(kind):
    def make(dtype, threads):
        torch.set_num_threads(threads)
        return kind(dtype, "cpu")

    return make


class Mlx:
    def __init__(self, dtype, threads):
        self.dtype = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}[dtype]
        mx.random.seed(1)

    def randn(self, *shape):
        value = mx.random.normal(shape).astype(self.dtype)
        mx.eval(value)
        return value

    @staticmethod
    def run(fn):
        return lambda: mx.eval(fn())

    def backward_of(self, fn, inputs, dy):
        return self.run(lambda: mx.vjp(fn, inputs, [dy])[1])

    def softmax(self, form, direction, rows, cols):
        x = self.randn(rows, cols)
        if direction == "fwd":
            return self.run(lambda: mx.softmax(x, -1, precise=True))
        y, dy = mx.softmax(x, -1, precise=True), self.randn(rows, cols)
        mx.eval(y)
        return self.run(lambda: y * (dy - (y * dy).sum(-1, keepdims=True)))

    def matmul(self, form, direction, *sizes):
        batch, (m, k, n) = sizes[:-3], sizes[-3:]
        if self.dtype != mx.float32 and m * k * n > 1 << 28:
            raise RuntimeError("left out: a call takes seconds")
        a = self.randn(*batch, k, m).swapaxes(-1, -2) if form == "tn" else self.randn(*batch, m, k)
        b = self.randn(*batch, n, k).swapaxes(-1, -2) if form == "nt" else self.randn(*batch, k, n)
        if form == "silu":
            bias = self.randn(n)
            return self.run(lambda: mlx_nn.silu(mx.addmm(bias, a, b)))
        return self.run(lambda: a @ b)

    def rms_norm(self, form, direction, rows, cols):
        x, w, other = self.randn(rows, cols), self.randn(cols), self.randn(rows, cols)
        if form == "residual":
            fn = lambda x, w, o: mx.fast.rms_norm(x + o, w, EPS)
        elif form == "gated":
            fn = lambda x, w, o: mx.fast.rms_norm(x, w, EPS) * mlx_nn.silu(o)
        elif form == "l2":
            fn = lambda x, w, o: x * mx.rsqrt((x * x).sum(-1, keepdims=True) + EPS)
        else:
            fn = lambda x, w, o: mx.fast.rms_norm(x, w, EPS)
        if direction == "fwd":
            return self.run(lambda: fn(x, w, other))
        if form == "":
            return self.backward_of(lambda x, w: fn(x, w, None), [x, w], self.randn(rows, cols))
        if form == "l2":
            return self.backward_of(lambda x: fn(x, None, None), [x], self.randn(rows, cols))
        return self.backward_of(fn, [x, w, other], self.randn(rows, cols))

    def conv1d_depthwise_causal(self, form, direction, tokens, channels, taps):
        act = mlx_nn.silu if form in ("silu", "step") else (lambda v: v)
        w = self.randn(channels, taps, 1)
        if form == "step":
            state, x = self.randn(tokens, taps - 1, channels), self.randn(tokens, 1, channels)
            return self.run(lambda: act(mx.conv1d(mx.concatenate([state, x], 1), w, groups=channels)))
        if tokens * channels > 1 << 24:
            raise RuntimeError("left out: a call takes 20 to 40 seconds")
        x = self.randn(1, tokens, channels)
        fn = lambda x, w: act(
            mx.conv1d(mx.pad(x, [(0, 0), (taps - 1, 0), (0, 0)]), w, groups=channels)
        )
        if direction == "fwd":
            return self.run(lambda: fn(x, w))
        return self.backward_of(fn, [x, w], self.randn(1, tokens, channels))

    def take_along_axis(self, form, direction, rows, cols, k):
        indices = mx.argpartition(mx.random.normal((rows, cols)), -k, -1)[:, -k:]
        mx.eval(indices)
        if direction == "fwd":
            x = self.randn(rows, cols)
            return self.run(lambda: mx.take_along_axis(x, indices, -1))
        x, dy = self.randn(rows, cols), self.randn(rows, k)
        return self.backward_of(lambda x: mx.take_along_axis(x, indices, -1), [x], dy)

    def moe_route(self, form, direction, tokens, experts, k):
        logits = self.randn(tokens, experts)

        def fn(logits):
            gates = mx.softmax(logits, -1, precise=True)
            indices = mx.stop_gradient(mx.argpartition(gates, -k, -1)[:, -k:])
            scores = mx.take_along_axis(gates, indices, -1)
            return scores if form == "full" else scores / scores.sum(-1, keepdims=True)

        if direction == "fwd":
            return self.run(lambda: fn(logits))
        return self.backward_of(fn, [logits], self.randn(tokens, k))

    def sort(self, form, direction, rows, cols):
        op = {
            "sort": lambda x: mx.sort(x, -1),
            "argsort": lambda x: mx.argsort(x, -1),
            "topk8": lambda x: mx.topk(x, 8),
            "topk1024": lambda x: mx.topk(x, 1024),
            "argmax_rows": lambda x: mx.argmax(x, 1),
            "argmax_columns": lambda x: mx.argmax(x, 0),
            "argmax_all": mx.argmax,
            "argpartition": lambda x: mx.argpartition(x, -1024),
        }[form]
        x = self.randn(rows, cols)
        return self.run(lambda: op(x))

    def scan(self, form, direction, rows, cols):
        x, axis = self.randn(rows, cols), 0 if form == "columns" else 1
        return self.run(lambda: mx.cumsum(x, axis, reverse=form == "reverse"))

    def layout(self, form, direction, rows, cols):
        x = self.randn(rows, cols)
        op = {
            "transpose": lambda: mx.contiguous(x.T),
            "concatenate": lambda: mx.concatenate([x, x], 1),
            "pad": lambda: mx.pad(x, 1),
        }[form]
        return self.run(op)

    def rope(self, form, direction, batch, heads, tokens, width):
        x = self.randn(batch, heads, tokens, width)
        return self.run(
            lambda: mx.fast.rope(x, width, traditional=False, base=10000.0, scale=1.0, offset=0)
        )

    def quantize(self, form, direction, rows, cols, bits):
        w = self.randn(rows, cols)
        if form != "back":
            return self.run(lambda: mx.quantize(w, bits=bits))
        codes, scales, biases = mx.quantize(w, bits=bits)
        back = lambda s, b: mx.dequantize(codes, s, b, bits=bits)
        if direction == "fwd":
            return self.run(lambda: back(scales, biases))
        return self.backward_of(lambda s, b: [back(s, b)], [scales, biases], w)

    def dropout(self, form, direction, rows, cols):
        x, fn = self.randn(rows, cols), mlx_nn.Dropout(0.1)
        return self.run(lambda: fn(x))

    def random(self, form, direction, n):
        draw = {"uniform": mx.random.uniform, "normal": mx.random.normal}[form]
        return self.run(lambda: draw(shape=(n,), dtype=self.dtype))


SLOW = 1.0  # seconds: a call that takes this long is timed once, its warm-up being the sample


def timed(call):
    start = time.perf_counter()
    call()
    return max(time.perf_counter() - start, 1e-7)


def sample(call, seconds):
    start = time.perf_counter()
    once = timed(call)
    group = max(1, min(1000, int(50e-6 / once)))
    end = start + seconds
    samples = []
    while len(samples) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in range(group):
            call()
        samples.append((time.perf_counter() - begin) * 1e6 / group)
    return samples


def main():
    peers = {}
    if torch:
        peers["torch"] = on_cpu(TorchOps)
    if torch and Qwen3NextConfig:
        peers["transformers"] = on_cpu(TransformersOps)
        peers["transformers eager"] = on_cpu(EagerExperts)
    if mx:
        peers["mlx"] = Mlx
    key, calls, slow = None, {}, {}
    for line in sys.stdin:
        ask = json.loads(line)
        wanted = tuple(ask[k] for k in ("op", "form", "pass", "shape", "dtype", "threads"))
        if wanted != key:
            key, calls, slow = wanted, {}, {}
            for name, kind in peers.items():
                try:
                    make = getattr(kind(ask["dtype"], ask["threads"]), ask["op"], None)
                    if make:
                        calls[name] = make(ask["form"], ask["pass"], *[int(n) for n in ask["shape"].split("x")])
                        once = timed(calls[name])
                        if once > SLOW:
                            slow[name] = [once * 1e6]
                except Exception as error:  # a type or a form that this library lacks
                    print(f"peers: {name} {line.strip()}: {error}", file=sys.stderr)
                    calls.pop(name, None)
        answer = {n: slow.get(n) or sample(c, ask["seconds"]) for n, c in calls.items()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
