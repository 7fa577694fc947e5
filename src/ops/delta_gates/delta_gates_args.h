// Read by delta_gates.cpp and its kernels. fwd: in a, b, A_log, dt_bias (both f32); out decay, beta. bwd: in … d_decay,
// d_beta or nothing; out da, db, and f32 [tokens, H], whose sums are the other two: d_decay·decay and dz.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

struct DeltaGatesArgs {
  int64_t tokens, heads;
};
static_assert(sizeof(DeltaGatesArgs) == 16, "host and device must agree");
