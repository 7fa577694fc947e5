"""Times PyTorch, torch.compile, Liger, fla and transformers on the GPU for `mlxtape bench ops --device cuda --peers`.

Reads one request a line, {"op", "form", "pass", "shape", "dtype", "seconds", "threads"}, and answers
with one line, {"torch": [us, ...], "torch.compile": [us, ...], ...}: the libraries that can be imported
and have the operation. As for our own rows, calls over so many sets of inputs that no cache holds one
from its last turn are captured into a CUDA graph, so that Python's own time is left out, and replayed.
Results are held while others are made, so that they too lie apart. A call that cannot be captured is
timed as it is, and its name says so.
"""

import collections
import json
import sys
import time

import torch
from torch_ops import EPS, Inputs, Qwen3NextConfig, TorchOps, TransformersOps

try:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.softmax import LigerSoftmaxFunction
except Exception as error:  # not there, or not made for this GPU
    print(f"peers: liger: {error}", file=sys.stderr)
    LigerRMSNormFunction = None
try:
    import fla.ops.common.chunk_o
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
except Exception as error:
    print(f"peers: fla: {error}", file=sys.stderr)
    causal_conv1d = None

COLD_BYTES = 256 << 20
GRAPH_CALLS = 20
SAMPLE_US = 10000  # replays that are timed together: a graph's own launch costs about 10 us

torch._functorch.config.donated_buffer = False  # a graph is walked more than once


class Compiled(TorchOps):
    compiled = staticmethod(lambda fn: torch.compile(fn, dynamic=False))

    def attention(self, *_):
        raise NotImplementedError("one library function, which compiling leaves as it is")


class Cudnn(TorchOps):
    """PyTorch's attention where it takes cuDNN's. Its gradient is not the same bits on every run."""

    def attention(self, *args):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            call = super().attention(*args)

        def run():
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
                return call()

        return run


class Liger(Inputs):
    def softmax(self, form, direction, rows, cols):
        x = self.randn(rows, cols).requires_grad_(direction == "bwd")
        if direction == "fwd":
            return lambda: LigerSoftmaxFunction.apply(x)
        return self.backward_of(LigerSoftmaxFunction.apply(x), (x,), self.randn(rows, cols))

    def rms_norm(self, form, direction, rows, cols):
        if form:
            raise NotImplementedError("the plain form alone")
        grad = direction == "bwd"
        x = self.randn(rows, cols).requires_grad_(grad)
        w = self.randn(cols).requires_grad_(grad)
        run = lambda: LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False)
        return self.backward_of(run(), (x, w), self.randn(rows, cols)) if grad else run


class Fla(Inputs):
    def conv1d_depthwise_causal(self, form, direction, tokens, channels, taps):
        if form == "step":
            raise NotImplementedError("whole sequences alone")
        grad = direction == "bwd"
        x = self.randn(1, tokens, channels).requires_grad_(grad)
        w = self.randn(channels, taps).requires_grad_(grad)
        run = lambda: causal_conv1d(x, w, activation=form or None)[0]
        return self.backward_of(run(), (x, w), self.randn(1, tokens, channels)) if grad else run

    def gated_delta_rule(self, form, direction, tokens, key_heads, heads, width):
        grad = direction == "bwd"
        q = self.randn(1, tokens, key_heads, width).requires_grad_(grad)
        k = self.randn(1, tokens, key_heads, width).requires_grad_(grad)
        v = self.randn(1, tokens, heads, width).requires_grad_(grad)
        decay = -(0.1 * torch.randn(1, tokens, heads, device=self.device)).abs()
        beta = torch.randn(1, tokens, heads, device=self.device).sigmoid()
        inputs = (q, k, v, decay.requires_grad_(grad), beta.requires_grad_(grad))
        # fla refuses the gradient on Hopper, where Triton 3.4 to 3.7.0 makes it wrong. It takes no less time for that.
        fla.ops.common.chunk_o.TRITON_ABOVE_3_4_0 = False

        def run():
            return chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)[0]

        if not grad:
            return run
        return self.backward_of(run(), inputs, self.randn(1, tokens, heads, width))


class Transformers(TransformersOps):
    def gated_delta_rule(self, form, direction, tokens, *sizes):
        if tokens > 4096:
            raise RuntimeError("left out: a loop over the chunks, minutes until it is captured")
        return super().gated_delta_rule(form, direction, tokens, *sizes)


def peers(op):
    found = {"torch": TorchOps, "torch.compile": Compiled}
    if op == "attention":
        found["cudnn"] = Cudnn
    if LigerRMSNormFunction:
        found["liger"] = Liger
    if causal_conv1d:
        found["fla"] = Fla
    if Qwen3NextConfig:
        found["transformers"] = Transformers
    return found


class Row:
    """A peer's calls of one row, ready to be timed."""

    def __init__(self, make, form, direction, shape):
        self.stream = torch.cuda.Stream()
        with torch.cuda.stream(self.stream):
            before = torch.cuda.memory_allocated()
            calls = [make(form, direction, *shape)]
            each = max(1, torch.cuda.memory_allocated() - before)
            while len(calls) * each < COLD_BYTES and len(calls) < 64:
                calls.append(make(form, direction, *shape))
            for call in calls * 2:  # compiles, tunes
                call()
            self.stream.synchronize()
            start = time.perf_counter()
            calls[0]()
            self.stream.synchronize()
            slow = time.perf_counter() - start > 0.02
        count = 3 if slow else max(GRAPH_CALLS, len(calls))
        self.todo = [calls[i % len(calls)] for i in range(count)]
        self.graph = torch.cuda.CUDAGraph()
        results = collections.deque(maxlen=max(1, COLD_BYTES // each * 2))
        try:
            with torch.cuda.graph(self.graph, stream=self.stream):
                for call in self.todo:
                    results.append(call())
        except Exception as error:
            print(f"peers: not captured: {error}", file=sys.stderr)
            self.graph = None
            torch.cuda.synchronize()
        self.repeats = 1
        once = min(self.sample(0)) * count  # the first replay uploads the graph
        self.repeats = max(1, int(SAMPLE_US / once))

    def run(self):
        for _ in range(self.repeats):
            if self.graph:
                self.graph.replay()
            else:
                for call in self.todo:
                    call()

    def sample(self, seconds):
        times = []
        end = time.perf_counter() + seconds
        with torch.cuda.stream(self.stream):
            while len(times) < 3 or time.perf_counter() < end:
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record()
                self.run()
                last.record()
                last.synchronize()
                times.append(first.elapsed_time(last) * 1e3 / len(self.todo) / self.repeats)
        return times


def main():
    key, rows = None, {}
    for line in sys.stdin:
        ask = json.loads(line)
        wanted = tuple(ask[k] for k in ("op", "form", "pass", "shape", "dtype"))
        if wanted != key:
            key, rows = wanted, {}
            torch.compiler.reset()
            torch.cuda.empty_cache()
            for name, kind in peers(ask["op"]).items():
                try:
                    make = getattr(kind(ask["dtype"], "cuda"), ask["op"], None)
                    if make:
                        shape = [int(n) for n in ask["shape"].split("x")]
                        rows[name] = Row(make, ask["form"], ask["pass"], shape)
                except Exception as error:  # a type or a form that this library lacks
                    print(f"peers: {name} {line.strip()}: {error}", file=sys.stderr)
        answer = {}
        for name, row in rows.items():
            label = name if row.graph else name + " (not captured)"  # Python's own time is in it
            answer[label] = row.sample(ask["seconds"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
