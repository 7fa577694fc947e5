// CPU kernels of quantized_matmul (formula: mlxtape/ops/quantized_matmul.h).
//
// fwd: a task has some rows of the weights, as they lie in memory, and all of x, which is put in order once
// (backends/cpu/device/packed-inl.h). Bound by reading the codes; with 8 rows of x by arithmetic.
// unpack and params_bwd: rows as tasks; codes are bytes in scratch first. Bound by the matrix beside them.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/quantized_matmul/quantized_matmul.cpu.cpp"
#include <hwy/foreach_target.h>

#include "backends/cpu/device/packed-inl.h"
#include "backends/cpu/device/tasks.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"
#include "quantized_matmul_args.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

template <class S>
Packed<S> packed_of(const KernelCall& call, std::size_t first) {
  const auto& args = call.as<QuantizedMatmulArgs>();
  return {call.input<std::uint32_t>(first),
          call.input<S>(first + 1),
          call.input<S>(first + 2),
          args.k,
          args.bits,
          args.group};
}

// Calls body(weights) with scales and biases of type T, or f32.
template <class T, class Body>
void with_packed(const KernelCall& call, std::size_t first, const Body& body) {
  if (call.as<QuantizedMatmulArgs>().wide != 0) return body(packed_of<float>(call, first));
  body(packed_of<T>(call, first));
}

std::size_t ordered_room(const void* opaque) {
  const auto& args = *static_cast<const QuantizedMatmulArgs*>(opaque);
  return static_cast<std::size_t>(args.m * args.k) * sizeof(float);
}

template <class T>
void quantized_matmul_fwd(const KernelCall& call) {
  const auto& args = call.as<QuantizedMatmulArgs>();
  const T* x = call.input<T>(0);                        // [m, k]
  T* y = call.output<T>(0);                             // [m, n]
  auto* ordered = static_cast<float*>(call.workspace);  // [m, k]
  order_row(x, args.m * args.k, ordered);
  with_packed<T>(call, 1, [&](const auto& w) {
    // Whole blocks of rows, so that few are done one by one.
    const std::int64_t each = ceil_div(cpu::rows_per_task(w.words() * 4), 4) * 4;
    parallel_for(ceil_div(args.n, each), [&](std::int64_t task) {
      const std::int64_t first = task * each, rows = std::min(each, args.n - first);
      const std::int64_t pitch = in_units(rows);
      Pieces pieces{cpu::thread_scratch(packed_room(args.k) + args.m * pitch)};
      float* room = pieces.take(packed_room(args.k));
      float* sums = pieces.take(args.m * pitch);
      for (std::int64_t m = 0; m < args.m; m += kMostFew) {
        packed_products(w, first, rows, ordered + m * args.k,
                        std::min<std::int64_t>(kMostFew, args.m - m), room, sums + m * pitch,
                        pitch);
      }
      for (std::int64_t m = 0; m < args.m; ++m) {
        store_row(sums + m * pitch, rows, y + m * args.n + first);
      }
    });
  });
}

template <class T>
void quantized_matmul_unpack(const KernelCall& call) {
  const auto& args = call.as<QuantizedMatmulArgs>();
  T* out = call.output<T>(0);  // [n, k]
  with_packed<T>(call, 0, [&](const auto& w) {
    const std::int64_t groups = w.groups();
    const std::int64_t each = cpu::rows_per_task(args.k * static_cast<std::int64_t>(sizeof(T)));
    parallel_for(ceil_div(args.n, each), [&](std::int64_t task) {
      const DF d;
      const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
      Pieces pieces{cpu::thread_scratch(2 * in_units(groups) + args.k)};
      float *s = pieces.take(groups), *b = pieces.take(groups);
      auto* room = reinterpret_cast<std::uint8_t*>(pieces.take(args.k));
      for (std::int64_t r = task * each; r < std::min(args.n, (task + 1) * each); ++r) {
        load_row(w.scales + r * groups, groups, s);
        load_row(w.biases + r * groups, groups, b);
        const std::uint8_t* bytes =
            codes_as_bytes(w.bits, w.codes + r * w.words(), args.k / kPackCodes, room);
        T* row = out + r * args.k;
        for (std::int64_t g = 0; g < groups; ++g) {
          const VF vs = hn::Set(d, s[g]), vb = hn::Set(d, b[g]);
          for (std::int64_t i = g * w.group; i < (g + 1) * w.group; i += 2 * lanes) {
            store2<false>(d, hn::MulAdd(vs, load_codes(d, bytes + i), vb),
                          hn::MulAdd(vs, load_codes(d, bytes + i + lanes), vb), row + i);
          }
        }
      }
    });
  });
}

template <class T>
void quantized_matmul_params_bwd(const KernelCall& call) {
  const auto& args = call.as<QuantizedMatmulArgs>();
  const float* dw = call.input<float>(0);                        // [n, k]
  const auto* codes = call.input<std::uint32_t>(1);              // [n, k·bits/32]
  T *dscales = call.output<T>(0), *dbiases = call.output<T>(1);  // [n, k/group]
  const std::int64_t groups = args.k / args.group, words = args.k * args.bits / 32;
  const std::int64_t each = cpu::rows_per_task(args.k * 4);
  parallel_for(ceil_div(args.n, each), [&](std::int64_t task) {
    const DF d;
    Pieces pieces{cpu::thread_scratch(2 * in_units(groups) + args.k)};
    float *ds = pieces.take(groups), *db = pieces.take(groups);
    auto* room = reinterpret_cast<std::uint8_t*>(pieces.take(args.k));
    for (std::int64_t r = task * each; r < std::min(args.n, (task + 1) * each); ++r) {
      const std::uint8_t* bytes =
          codes_as_bytes(args.bits, codes + r * words, args.k / kPackCodes, room);
      for (std::int64_t g = 0; g < groups; ++g) {
        const float* row = dw + r * args.k + g * args.group;
        VF scale = hn::Zero(d), bias = hn::Zero(d);
        each_vector(args.group, [&](std::int64_t i) HWY_ATTR {
          const VF v = hn::LoadU(d, row + i);
          scale = hn::MulAdd(v, load_codes(d, bytes + g * args.group + i), scale);
          bias = hn::Add(v, bias);
        });
        ds[g] = sum_lanes(d, scale);
        db[g] = sum_lanes(d, bias);
      }
      if (dscales != nullptr) store_row(ds, groups, dscales + r * groups);
      if (dbiases != nullptr) store_row(db, groups, dbiases + r * groups);
    }
  });
}

}  // namespace

void register_quantized_matmul(KernelRegistry& registry) {
  const auto add = [&]<class T>(T, const std::string& type) {
    registry.add(Backend::kCpu, "quantized_matmul_fwd_" + type, quantized_matmul_fwd<T>,
                 ordered_room);
    registry.add(Backend::kCpu, "quantized_matmul_unpack_" + type, quantized_matmul_unpack<T>);
    registry.add(Backend::kCpu, "quantized_matmul_params_bwd_" + type,
                 quantized_matmul_params_bwd<T>);
  };
  add(float(), "f32");
  add(F16(), "f16");
  add(BF16(), "bf16");
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(quantized_matmul)
