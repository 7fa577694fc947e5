// Kernels that the tests of the Metal backend's host side launch: one for each way to bind something.
#ifdef __METAL_VERSION__

#include <metal_stdlib>
using namespace metal;

struct ScaleArgs {
  float by;
  int n;
};

[[kernel]] void host_scale(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                           constant ScaleArgs& args [[buffer(2)]],
                           uint i [[thread_position_in_grid]]) {
  if (int(i) < args.n) y[i] = args.by * x[i];
}

constant bool a_bool [[function_constant(0)]];
constant int an_int [[function_constant(1)]];
constant uint a_uint [[function_constant(2)]];
constant float a_float [[function_constant(3)]];

[[kernel]] void host_constants(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  if (i != 0) return;
  y[0] = a_bool ? 1.0f : 0.0f;
  y[1] = float(an_int);
  y[2] = float(a_uint);
  y[3] = a_float;
}

[[kernel]] void host_parts(device uint* y [[buffer(0)]], constant uint& first_group [[buffer(30)]],
                           uint group [[threadgroup_position_in_grid]],
                           uint index [[thread_position_in_threadgroup]]) {
  y[(group + first_group) * 32 + index] = group + first_group;
}

struct Table {
  device const float* x[384];  // as many as an encoder takes
};

[[kernel]] void host_table(constant Table& table [[buffer(0)]], device float* y [[buffer(1)]],
                           constant uint& count [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  float sum = 0;
  for (uint k = 0; k < count; ++k) sum += table.x[k][i];
  y[i] = sum;
}

[[kernel]] void host_shared(device float* y [[buffer(0)]],
                            threadgroup float* room [[threadgroup(0)]],
                            uint i [[thread_position_in_threadgroup]]) {
  room[i] = y[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = room[63 - i];
}

#else

#include "backends/metal/host_kernels.h"

#include "backends/metal/launch.h"

namespace mlxtape::test {

namespace {

using metal::Launch;

const Kernel& registered(const char* name, KernelFn fn) {
  KernelRegistry& registry = KernelRegistry::instance();
  if (!registry.has(Backend::kMetal, name)) registry.add(Backend::kMetal, name, fn);
  return registry.find(Backend::kMetal, name);
}

}  // namespace

const Kernel& host_scale() {
  return registered("host_scale", [](const KernelCall& call) {
    Launch(call, metal::kernel("host_scale"))
        .buffers()
        .groups(ceil_div(call.as<ScaleArgs>().n, 64))
        .threads(64)
        .run();
  });
}

const Kernel& host_constants() {
  return registered("host_constants", [](const KernelCall& call) {
    Launch(call, metal::kernel("host_constants"))
        .constant(0, true)
        .constant(1, std::int32_t{-7})
        .constant(2, std::uint32_t{4000000000})
        .constant(3, 0.25F)
        .buffers()
        .groups(1)
        .threads(32)
        .run();
  });
}

const Kernel& host_parts() {
  return registered("host_parts", [](const KernelCall& call) {
    Launch(call, metal::kernel("host_parts"))
        .buffers()
        .in_parts()
        .groups(call.as<std::int64_t>())
        .threads(32)
        .run();
  });
}

const Kernel& host_slow() {
  return registered("host_slow", [](const KernelCall& call) {
    const std::int64_t groups = call.as<std::int64_t>();
    Launch(call, metal::kernel("host_parts"))
        .buffers()
        .in_parts()
        .operations(1.5e10 * static_cast<double>(groups))
        .groups(groups)
        .threads(32)
        .run();
  });
}

const Kernel& host_table() {
  return registered("host_table", [](const KernelCall& call) {
    Launch(call, metal::kernel("host_table"))
        .table(0, 384, call.in, {})
        .output(1, call.out[0])
        .bytes(2, static_cast<std::uint32_t>(call.in.size()))
        .groups(2)
        .threads(32)
        .run();
  });
}

const Kernel& host_shared() {
  return registered("host_shared", [](const KernelCall& call) {
    Launch(call, metal::kernel("host_shared"))
        .output(0, call.out[0])
        .group_memory(64 * sizeof(float))
        .groups(1)
        .threads(64)
        .run();
  });
}

const Kernel& host_too_wide() {
  return registered("host_too_wide", [](const KernelCall& call) {
    Launch(call, metal::kernel("host_parts")).buffers().in_parts().groups(1).threads(2048).run();
  });
}

const Kernel& host_stray() {
  return registered("host_stray", [](const KernelCall& call) {
    static float elsewhere[64];
    Launch(call, metal::kernel("host_parts")).output(0, elsewhere).groups(1).threads(32).run();
  });
}

const char* host_source() { return metal::texts::host_kernels.source; }

}  // namespace mlxtape::test

#endif
