// CPU kernels of dampen (formula and layout: mlxtape/ops/dampen.h).
//
// Rows over threads, each read twice, the second time from the cache. Plain loops: bound by memory
// for rows in f32; the sums would be the first thing to vectorise.
#include "backends/cpu/device/tasks.h"
#include "dampen_args.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"

namespace mlxtape::ops {

namespace {

// Calls row(r) for each row, several rows per task; moved: arrays of x's size that are read or
// written.
template <class T, class Row>
void for_rows(const DampenArgs& args, std::int64_t moved, const Row& row) {
  const std::int64_t bytes = moved * args.cols * static_cast<std::int64_t>(sizeof(T));
  const std::int64_t each = cpu::rows_per_task(bytes);
  parallel_for(ceil_div(args.rows, each), [&](std::int64_t task) {
    for (std::int64_t r = task * each; r < std::min(args.rows, (task + 1) * each); ++r) row(r);
  });
}

template <class T>
void dampen_fwd(const KernelCall& call) {
  const auto& args = call.as<DampenArgs>();
  const T* x_all = call.input<T>(0);         // [R, C]
  const float* gain = call.input<float>(1);  // [R]
  T* y_all = call.output<T>(0);              // [R, C]
  float* m = call.output<float>(1);          // [R]
  for_rows<T>(args, 2, [&](std::int64_t r) {
    const T* x = x_all + r * args.cols;
    T* y = y_all + r * args.cols;
    float sum = 0;
    for (std::int64_t c = 0; c < args.cols; ++c) {
      const auto v = static_cast<float>(x[c]);
      sum += v * v;
    }
    m[r] = sum / static_cast<float>(args.cols);
    const float u = 1 / (1 + gain[r] * m[r]);
    for (std::int64_t c = 0; c < args.cols; ++c) {
      y[c] = static_cast<T>(u * static_cast<float>(x[c]));
    }
  });
}

template <class T>
void dampen_bwd(const KernelCall& call) {
  const auto& args = call.as<DampenArgs>();
  const T* x_all = call.input<T>(0);         // [R, C]
  const float* gain = call.input<float>(1);  // [R]
  const float* m = call.input<float>(2);     // [R]
  const T* dy_all = call.input<T>(3);        // [R, C]
  T* dx_all = call.output<T>(0);             // [R, C]
  float* dgain = call.output<float>(1);      // [R]
  for_rows<T>(args, 3, [&](std::int64_t r) {
    const T* x = x_all + r * args.cols;
    const T* dy = dy_all + r * args.cols;
    T* dx = dx_all + r * args.cols;
    float s = 0;
    for (std::int64_t c = 0; c < args.cols; ++c) {
      s += static_cast<float>(dy[c]) * static_cast<float>(x[c]);
    }
    const float u = 1 / (1 + gain[r] * m[r]);
    const float w = 2 / static_cast<float>(args.cols) * gain[r] * u * u * s;
    for (std::int64_t c = 0; c < args.cols; ++c) {
      dx[c] = static_cast<T>(u * static_cast<float>(dy[c]) - w * static_cast<float>(x[c]));
    }
    dgain[r] = -m[r] * u * u * s;
  });
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kCpu, "dampen_fwd_" + type, dampen_fwd<T>);
  registry.add(Backend::kCpu, "dampen_bwd_" + type, dampen_bwd<T>);
}

}  // namespace

void register_dampen_cpu(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops
