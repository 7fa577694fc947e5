// CPU kernels of quantized_experts (formula: mlxtape/ops/experts.h and quantize.h).
//
// Pairs (token, expert) stand in the order of their experts, and up to 8 of one expert meet its codes at once
// (backends/cpu/device/packed-inl.h). hidden: a task has such a block and a strip of inner channels; a is left in the
// order in which the second product reads it. out: a task has a strip of channels of y and goes over all blocks in
// order, so nothing is added twice at once. Bound by reading the codes up to about 4 pairs an expert, by arithmetic
// with more.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/quantized_experts/quantized_experts.cpu.cpp"
#include <hwy/foreach_target.h>

#include <span>

#include "backends/cpu/device/packed-inl.h"
#include "backends/cpu/device/tasks.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"
#include "quantized_experts_args.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

constexpr std::int64_t kStrip = 64;  // rows of weights in a task

// Some of an expert's pairs: places [first, first + count) of the order.
struct Block {
  std::int64_t expert, first, count;
};

// Pairs by expert, in the kernel's workspace; those whose index is past E stand in no block.
struct Pairs {
  std::span<Block> blocks;
  std::span<std::uint32_t> order;

  static std::size_t room(const void* opaque) {
    const auto& args = *static_cast<const QuantizedExpertsArgs*>(opaque);
    const auto pairs = static_cast<std::size_t>(args.tokens * args.chosen);
    return pairs * (sizeof(Block) + sizeof(std::uint32_t)) +
           (static_cast<std::size_t>(args.experts) + 1) * sizeof(std::int64_t);
  }
  Pairs(const QuantizedExpertsArgs& args, const std::uint32_t* indices, void* room) {
    const std::int64_t pairs = args.tokens * args.chosen;
    auto* all = static_cast<Block*>(room);
    const std::span next(reinterpret_cast<std::int64_t*>(all + pairs),
                         static_cast<std::size_t>(args.experts) + 1);
    order = {reinterpret_cast<std::uint32_t*>(next.data() + next.size()),
             static_cast<std::size_t>(pairs)};
    std::fill(next.begin(), next.end(), 0);
    const auto of = [&](std::int64_t pair) {
      return static_cast<std::size_t>(std::min<std::int64_t>(indices[pair], args.experts));
    };
    for (std::int64_t i = 0; i < pairs; ++i) ++next[of(i)];
    std::int64_t sum = 0;
    std::size_t count = 0;
    for (std::int64_t e = 0; e <= args.experts; ++e) {
      const std::int64_t first = sum, end = sum += next[static_cast<std::size_t>(e)];
      next[static_cast<std::size_t>(e)] = first;
      for (std::int64_t i = first; e < args.experts && i < end; i += kMostFew) {
        all[count++] = {e, i, std::min<std::int64_t>(kMostFew, end - i)};
      }
    }
    blocks = {all, count};
    for (std::int64_t i = 0; i < pairs; ++i) {
      order[static_cast<std::size_t>(next[of(i)]++)] = static_cast<std::uint32_t>(i);
    }
  }
};

// Calls body(weights [E·N, K]) with scales and biases of type T, or f32.
template <class T, class Body>
void with_packed(const KernelCall& call, std::size_t first, const QuantizedExpertsArgs::Form& form,
                 std::int64_t k, const Body& body) {
  const auto* codes = call.input<std::uint32_t>(first);
  const auto as = [&](auto zero) {
    using S = decltype(zero);
    body(Packed<S>{codes, call.input<S>(first + 1), call.input<S>(first + 2), k, form.bits,
                   form.group});
  };
  form.wide != 0 ? as(float()) : as(T());
}

template <class T>
void hidden_fwd(const KernelCall& call) {
  const auto& args = call.as<QuantizedExpertsArgs>();
  const T* x = call.input<T>(0);
  const Pairs pairs(args, call.input<std::uint32_t>(1), call.workspace);
  float* active = call.output<float>(0);  // [places, I], ordered
  const std::int64_t strips = ceil_div(args.inner, kStrip), width = args.width;
  const auto run = [&](const auto& gate, const auto& up) {
    parallel_for(static_cast<std::int64_t>(pairs.blocks.size()) * strips, [&](std::int64_t task) {
      const Block& block = pairs.blocks[static_cast<std::size_t>(task / strips)];
      const std::int64_t from = task % strips * kStrip;
      const std::int64_t rows = std::min(kStrip, args.inner - from);
      Pieces pieces{cpu::thread_scratch(kMostFew * (width + 2 * kStrip) + packed_room(width))};
      float* columns = pieces.take(kMostFew * width);
      float *g = pieces.take(kMostFew * kStrip), *u = pieces.take(kMostFew * kStrip);
      float* room = pieces.take(packed_room(width));
      const std::int64_t row = block.expert * args.inner + from;
      const auto multiply = [&](const auto& w, float* out) {
        const Order order = order_for<T>(w.bits, w.group);
        for (std::int64_t i = 0; i < block.count; ++i) {
          const std::int64_t token =
              pairs.order[static_cast<std::size_t>(block.first + i)] / args.chosen;
          order_row(order, x + token * width, width, w.group, columns + i * width);
        }
        packed_products(w, row, rows, order, columns, block.count, room, out, kStrip);
      };
      multiply(gate, g);
      multiply(up, u);
      const DF d;
      for (std::int64_t i = 0; i < block.count; ++i) {
        float *gi = g + i * kStrip, *ui = u + i * kStrip;
        each_vector(rows, [&](std::int64_t c) HWY_ATTR {
          const VF z = hn::LoadU(d, gi + c);
          hn::StoreU(hn::Mul(hn::Mul(z, sigmoid(d, 0.0F, z).value), hn::LoadU(d, ui + c)), d,
                     gi + c);
        });
        order_row(gi, rows, active + (block.first + i) * args.inner + from);
      }
    });
  };
  with_packed<T>(call, 2, args.gate, width, [&](const auto& gate) {
    with_packed<T>(call, 5, args.up, width, [&](const auto& up) { run(gate, up); });
  });
}

template <class T>
void out_fwd(const KernelCall& call) {
  const auto& args = call.as<QuantizedExpertsArgs>();
  const float* active = call.input<float>(0);  // [places, I], ordered
  const Pairs pairs(args, call.input<std::uint32_t>(1), call.workspace);
  const T* scores = call.input<T>(2);
  T* y = call.output<T>(0);
  with_packed<T>(call, 3, args.down, args.inner, [&](const auto& down) {
    parallel_for(ceil_div(args.width, kStrip), [&](std::int64_t task) {
      const std::int64_t from = task * kStrip, rows = std::min(kStrip, args.width - from);
      Pieces pieces{
          cpu::thread_scratch((args.tokens + kMostFew) * kStrip + packed_room(args.inner))};
      float* sums = pieces.take(args.tokens * kStrip);
      float* made = pieces.take(kMostFew * kStrip);
      float* room = pieces.take(packed_room(args.inner));
      fill_row(0, args.tokens * kStrip, sums);
      for (const Block& block : pairs.blocks) {
        packed_products(down, block.expert * args.width + from, rows, Order::kF32,
                        active + block.first * args.inner, block.count, room, made, kStrip);
        for (std::int64_t i = 0; i < block.count; ++i) {
          const std::uint32_t pair = pairs.order[static_cast<std::size_t>(block.first + i)];
          add_row(static_cast<float>(scores[pair]), made + i * kStrip, in_units(rows),
                  sums + pair / args.chosen * kStrip);
        }
      }
      for (std::int64_t t = 0; t < args.tokens; ++t) {
        store_row(sums + t * kStrip, rows, y + t * args.width + from);
      }
    });
  });
}

}  // namespace

void register_quantized_experts(KernelRegistry& registry) {
  const auto add = [&]<class T>(T, const std::string& type) {
    registry.add(Backend::kCpu, "quantized_experts_hidden_fwd_" + type, hidden_fwd<T>, Pairs::room);
    registry.add(Backend::kCpu, "quantized_experts_out_fwd_" + type, out_fwd<T>, Pairs::room);
  };
  add(float(), "f32");
  add(F16(), "f16");
  add(BF16(), "bf16");
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(quantized_experts)
