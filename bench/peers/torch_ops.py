"""The operations as PyTorch users write them, on any device. Each method returns a function to time,
on inputs of its own: normal random numbers, like ours."""

import types

import torch
import torch.nn.functional as F

try:
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import (
        Qwen3NextExperts,
        eager_attention_forward,
        torch_chunk_gated_delta_rule,
    )
except ImportError:
    Qwen3NextConfig = None

EPS = 1e-6


class Inputs:
    def __init__(self, dtype, device):
        self.dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
        self.device = device
        torch.manual_seed(1)

    def randn(self, *shape):
        n = int(torch.Size(shape).numel())
        block = torch.randn(min(1000003, n), device=self.device)
        return block.repeat((n + len(block) - 1) // len(block))[:n].to(self.dtype).reshape(shape)

    @staticmethod
    def backward_of(y, inputs, dy):
        return lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True)


class TorchOps(Inputs):
    compiled = staticmethod(lambda fn: fn)  # a subclass may wrap what is timed

    def softmax(self, form, direction, rows, cols):
        x = self.randn(rows, cols)
        forward = self.compiled(lambda x: torch.softmax(x, -1))
        if direction == "fwd":
            return lambda: forward(x)
        backward = self.compiled(lambda dy, y: torch._softmax_backward_data(dy, y, -1, self.dtype))
        y, dy = torch.softmax(x, -1), self.randn(rows, cols)
        return lambda: backward(dy, y)

    def log_softmax(self, form, direction, rows, cols):
        x = self.randn(rows, cols)
        forward = self.compiled(lambda x: torch.log_softmax(x, -1))
        if direction == "fwd":
            return lambda: forward(x)
        backward = self.compiled(lambda dy, y: torch._log_softmax_backward_data(dy, y, -1, self.dtype))
        y, dy = torch.log_softmax(x, -1), self.randn(rows, cols)
        return lambda: backward(dy, y)

    def of_loss(self, loss, direction, inputs):
        if direction == "fwd":
            return lambda: loss(*inputs)
        inputs = tuple(x.requires_grad_() for x in inputs)
        if direction == "bwd":
            return self.backward_of(loss(*inputs), inputs, None)
        return lambda: torch.autograd.grad(loss(*inputs), inputs)

    def cross_entropy(self, form, direction, rows, cols):
        target = torch.randint(cols, (rows,), device=self.device)
        loss = self.compiled(lambda z: F.cross_entropy(z, target))
        return self.of_loss(loss, direction, (self.randn(rows, cols),))

    def kl_divergence(self, form, direction, rows, cols):
        teacher = self.randn(rows, cols)
        loss = self.compiled(
            lambda z: F.kl_div(
                F.log_softmax(z, -1), F.log_softmax(teacher, -1), reduction="batchmean", log_target=True
            )
        )
        return self.of_loss(loss, direction, (self.randn(rows, cols),))

    def linear_loss(self, form, direction, rows, width, classes):
        target = torch.randint(classes, (rows,), device=self.device)
        loss = self.compiled(lambda h, w: F.cross_entropy(F.linear(h, w), target))
        return self.of_loss(loss, direction, (self.randn(rows, width), self.randn(classes, width) * 0.05))

    def matmul(self, form, direction, *sizes):
        batch, (m, k, n) = sizes[:-3], sizes[-3:]
        a = self.randn(*batch, k, m).mT if form == "tn" else self.randn(*batch, m, k)
        b = self.randn(*batch, n, k).mT if form == "nt" else self.randn(*batch, k, n)
        if form == "silu":
            bias = self.randn(n)
            fn = self.compiled(lambda a, b: F.silu(torch.addmm(bias, a, b)))
        else:
            fn = self.compiled(lambda a, b: a @ b)
        return lambda: fn(a, b)

    def rms_norm(self, form, direction, rows, cols):
        grad = direction == "bwd"
        x = self.randn(rows, cols).requires_grad_(grad)
        w = self.randn(cols).requires_grad_(grad)
        other = self.randn(rows, cols).requires_grad_(grad)
        if form == "residual":
            fn = self.compiled(lambda x, w, o: F.rms_norm(x + o, (cols,), w, EPS))
        elif form == "gated":
            fn = self.compiled(lambda x, w, o: F.rms_norm(x, (cols,), w, EPS) * F.silu(o))
        elif form == "l2":
            fn = self.compiled(lambda x, w, o: F.normalize(x, dim=-1))
        else:
            fn = self.compiled(lambda x, w, o: F.rms_norm(x, (cols,), w, EPS))
        if not grad:
            return lambda: fn(x, w, other)
        inputs = {"": (x, w), "l2": (x,)}.get(form, (x, w, other))
        return self.backward_of(fn(x, w, other), inputs, self.randn(rows, cols))

    def conv1d_depthwise_causal(self, form, direction, tokens, channels, taps):
        grad = direction == "bwd"
        w = self.randn(channels, 1, taps).requires_grad_(grad)
        act = F.silu if form in ("silu", "step") else (lambda v: v)
        if form == "step":
            state, x = self.randn(tokens, taps - 1, channels), self.randn(tokens, 1, channels)
            wt = w.detach()[:, 0, :].t().contiguous()

            def step(state, x):
                window = torch.cat([state, x], 1)
                state.copy_(window[:, 1:])
                return F.silu((window * wt).sum(1))

            fn = self.compiled(step)
            return lambda: fn(state, x)
        # PyTorch's own layout [1, C, T], which it is fastest on.
        x = self.randn(1, channels, tokens).requires_grad_(grad)
        fn = self.compiled(
            lambda x, w: act(F.conv1d(x, w, groups=channels, padding=taps - 1)[..., :tokens])
        )
        if not grad:
            return lambda: fn(x, w)
        return self.backward_of(fn(x, w), (x, w), self.randn(1, channels, tokens))

    def take_along_axis(self, form, direction, rows, cols, k):
        indices = torch.rand(rows, cols, device=self.device).topk(k, -1).indices
        if direction == "fwd":
            x = self.randn(rows, cols)
            forward = self.compiled(lambda x, i: torch.gather(x, 1, i))
            return lambda: forward(x, indices)
        dy = self.randn(rows, k)
        backward = self.compiled(
            lambda dy, i: dy.new_zeros(rows, cols).scatter_add_(1, i, dy)
        )
        return lambda: backward(dy, indices)

    def moe_route(self, form, direction, tokens, experts, k):
        logits = self.randn(tokens, experts).requires_grad_(direction == "bwd")

        def route(logits):
            gates = torch.softmax(logits, -1, dtype=torch.float32)
            scores, indices = torch.topk(gates, k, -1)
            if form != "full":
                scores = scores / scores.sum(-1, keepdim=True)
            return scores.to(self.dtype), indices

        def route_and_count(logits):
            scores, indices = route(logits)
            chosen = indices.flatten()
            counts = torch.zeros(experts, dtype=torch.int32, device=chosen.device)
            return scores, indices, counts.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int32))

        if direction == "fwd":
            forward = self.compiled(route_and_count)
            return lambda: forward(logits)
        return self.backward_of(self.compiled(route)(logits)[0], (logits,), self.randn(tokens, k))

    # Functions that are the same word in the language, by the form's name; what goes another way is here.
    ELEMENTWISE = {
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "silu": F.silu,
        "softplus": F.softplus,
        "clip": lambda x: torch.clamp(x, -1.25, 0.5),
        "power": torch.pow,
        "swiglu": lambda a, b: F.silu(a) * b,
    }
    TWO = {"add", "subtract", "multiply", "divide", "power", "maximum", "minimum", "swiglu", "less"}

    def elementwise(self, form, direction, rows, cols):
        name, _, other = form.partition("_") if form.split("_")[0] in self.TWO else (form, "", "")
        op = self.ELEMENTWISE.get(name) or getattr(torch, name)
        fn = self.compiled(op)
        positive = name in ("log", "log1p", "rsqrt", "sqrt", "divide", "power")
        make = (lambda *s: self.randn(*s).abs()) if positive else self.randn
        inputs = [make(rows, cols)]
        if name in self.TWO:
            inputs.append(make(*{"": (rows, cols), "row": (cols,), "column": (rows, 1), "one": (1,)}[other]))
        if direction == "fwd":
            return lambda: fn(*inputs)
        inputs = [v.requires_grad_() for v in inputs]
        dy = self.randn(rows, cols)
        return lambda: torch.autograd.grad(fn(*inputs), inputs, dy)

    def reduce(self, form, direction, rows, cols):
        name, _, axes = form.partition("_")
        dim = {"rows": (1,), "columns": (0,), "all": (0, 1)}[axes]
        op = {
            "sum": torch.sum,
            "max": torch.amax,
            "logsumexp": torch.logsumexp,
            "var": lambda x, dim: torch.var(x, dim, correction=0),
        }[name]
        fn, x = self.compiled(op), self.randn(rows, cols)
        return lambda: fn(x, dim)

    def take(self, form, direction, rows, width, n):
        ids = torch.randint(rows, (n,), device=self.device)
        if direction == "fwd":
            x = self.randn(rows, width)
            return lambda: torch.index_select(x, 0, ids)
        dy = self.randn(n, width)
        return lambda: torch.zeros(rows, width, dtype=self.dtype, device=self.device).index_add_(0, ids, dy)

    # The dense gradient is the autograd function's own; by rows it is sorted and summed, as ours is.
    def embedding(self, form, direction, rows, width, n):
        ids = (rows ** torch.rand(n, device=self.device)).long() - 1
        if direction == "fwd":
            weight = self.randn(rows, width)
            return lambda: F.embedding(ids, weight)
        dy = self.randn(n, width)
        if form == "dense":
            return lambda: torch.ops.aten.embedding_dense_backward(dy, ids, rows, -1, False)
        return lambda: torch.sparse_coo_tensor(ids[None], dy, (rows, width)).coalesce()

    def scatter(self, form, direction, rows, cols, k):
        x = self.randn(rows, cols)
        if form == "rows":
            ids, values = torch.randint(rows, (k,), device=self.device), self.randn(k, cols)
            return lambda: torch.index_add(x, 0, ids, values)
        ids, values = torch.randint(cols, (rows, k), device=self.device), self.randn(rows, k)
        op = torch.scatter if form == "put" else torch.scatter_add
        return lambda: op(x, 1, ids, values)

    def sort(self, form, direction, rows, cols):
        op = {
            "sort": lambda x: torch.sort(x, dim=-1, stable=True),
            "argsort": lambda x: torch.sort(x, dim=-1, stable=True)[1],
            "topk8": lambda x: torch.topk(x, 8),
            "topk1024": lambda x: torch.topk(x, 1024),
            "argmax_rows": lambda x: torch.argmax(x, 1),
            "argmax_columns": lambda x: torch.argmax(x, 0),
            "argmax_all": torch.argmax,
        }[form]
        fn, x = self.compiled(op), self.randn(rows, cols)
        return lambda: fn(x)

    def scan(self, form, direction, rows, cols):
        x, dim = self.randn(rows, cols), 0 if form == "columns" else 1
        if form == "reverse":
            fn = self.compiled(lambda x: x.flip(dim).cumsum(dim).flip(dim))
        else:
            fn = self.compiled(lambda x: torch.cumsum(x, dim))
        return lambda: fn(x)

    def layout(self, form, direction, rows, cols):
        x = self.randn(rows, cols)
        return {
            "transpose": lambda: x.t().contiguous(),
            "concatenate": lambda: torch.cat([x, x], 1),
            "pad": lambda: torch.nn.functional.pad(x, (1, 1, 1, 1)),
        }[form]

    def rope(self, form, direction, batch, heads, tokens, width):
        # As models write it; the table of sines is made once and for all tokens, and not timed.
        x = self.randn(batch, heads, tokens, width)
        periods = 10000.0 ** (torch.arange(0, width, 2, device=self.device) / width)
        angles = torch.arange(tokens, device=self.device)[:, None] / periods
        cos, sin = (torch.cat([f(angles)] * 2, -1).to(x.dtype) for f in (torch.cos, torch.sin))

        def turn():
            first, second = x.chunk(2, -1)
            return x * cos + torch.cat([-second, first], -1) * sin

        return turn

    def attention(self, form, direction, tokens, heads, key_heads, width):
        # PyTorch's own layout [B, H, T, D].
        grad = direction == "bwd"
        q = self.randn(1, heads, tokens, width).requires_grad_(grad)
        k = self.randn(1, key_heads, tokens, width).requires_grad_(grad)
        v = self.randn(1, key_heads, tokens, width).requires_grad_(grad)
        fn = self.compiled(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        )
        if not grad:
            return lambda: fn(q, k, v)
        return self.backward_of(fn(q, k, v), (q, k, v), self.randn(1, heads, tokens, width))

    def optimiser(self, form, direction, n):
        if form != "adamw":
            raise ValueError("PyTorch has no such step")
        w = self.randn(n).requires_grad_()
        w.grad = self.randn(n)
        step = torch.optim.AdamW([w], lr=1e-3, fused=True)
        return lambda: step.step()

    def dropout(self, form, direction, rows, cols):
        x = self.randn(rows, cols)
        fn = self.compiled(lambda x: F.dropout(x, 0.1))
        return lambda: fn(x)

    def random(self, form, direction, n):
        draw = {"uniform": torch.rand, "normal": torch.randn}[form]
        fn = self.compiled(lambda: draw(n, dtype=self.dtype, device=self.device))
        return fn


class TransformersOps(Inputs):
    """The layers' parts as transformers runs Qwen3-Next where no kernels of other packages are installed."""

    def attention(self, form, direction, tokens, heads, key_heads, width):
        if heads * tokens * tokens > 1 << 30:
            raise RuntimeError("left out: three and more arrays of the weights' size, 4 GiB each")
        grad = direction == "bwd"
        q = self.randn(1, heads, tokens, width).requires_grad_(grad)
        k, v = (self.randn(1, key_heads, tokens, width).requires_grad_(grad) for _ in range(2))
        module = types.SimpleNamespace(num_key_value_groups=heads // key_heads, training=False)
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=self.device).triu(1)
        mask = torch.zeros(1, 1, tokens, tokens, dtype=self.dtype, device=self.device)
        mask.masked_fill_(later, torch.finfo(self.dtype).min)

        def attend(q, k, v):
            return eager_attention_forward(module, q, k, v, mask, scaling=width**-0.5)[0]

        if not grad:
            return lambda: attend(q, k, v)
        return self.backward_of(attend(q, k, v), (q, k, v), self.randn(1, tokens, heads, width))

    # Key heads are repeated first.
    def gated_delta_rule(self, form, direction, tokens, key_heads, heads, width):
        grad = direction == "bwd"
        q = self.randn(1, tokens, key_heads, width).requires_grad_(grad)
        k = self.randn(1, tokens, key_heads, width).requires_grad_(grad)
        v = self.randn(1, tokens, heads, width).requires_grad_(grad)
        decay = -(0.1 * torch.randn(1, tokens, heads, device=self.device)).abs()
        beta = torch.randn(1, tokens, heads, device=self.device).sigmoid()
        decay, beta = decay.requires_grad_(grad), beta.requires_grad_(grad)

        def rule(q, k, v, decay, beta):
            q, k = (x.repeat_interleave(heads // key_heads, dim=2) for x in (q, k))
            return torch_chunk_gated_delta_rule(q, k, v, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)[0]

        inputs = (q, k, v, decay, beta)
        if not grad:
            return lambda: rule(*inputs)
        return self.backward_of(rule(*inputs), inputs, self.randn(1, tokens, heads, width))

    experts_as = "grouped_mm"  # what a model takes unless told otherwise

    def experts(self, form, direction, tokens, experts, k, width, inner):
        config = Qwen3NextConfig(
            hidden_size=width, moe_intermediate_size=inner, num_experts=experts, num_experts_per_tok=k
        )
        config._experts_implementation = self.experts_as
        grad = direction == "bwd"
        with torch.device("meta"):
            module = Qwen3NextExperts(config)
        for name, weight in list(module.named_parameters()):
            values = self.randn(*weight.shape) * 0.02
            setattr(module, name, torch.nn.Parameter(values, requires_grad=grad))
        x = self.randn(tokens, width).requires_grad_(grad)
        scores, indices = torch.randn(tokens, experts, device=self.device).softmax(-1).topk(k, -1)
        scores = (scores / scores.sum(-1, keepdim=True)).to(self.dtype).requires_grad_(grad)
        if not grad:
            return lambda: module(x, indices, scores)
        inputs = (x, scores, *module.parameters())
        return self.backward_of(module(x, indices, scores), inputs, self.randn(tokens, width))


class EagerExperts(Inputs):
    """The loop over experts. Its gradient is slow: each expert's is first made as large as the weights of all."""

    experts_as = "eager"
    experts = TransformersOps.experts
