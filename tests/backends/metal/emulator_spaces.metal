// What the pass over address spaces must refuse: every line with the word in its comment, and no other. The emulator takes
// most of it, because in C++ all memory is one.
#include <metal_stdlib>
using namespace metal;

float first_of(device const float* x) { return x[0]; }
float first_of_room(threadgroup const float* x) { return x[0]; }
void put(thread float& to, float v) { to = v; }

struct Pair {
  float a, b;
  float sum() const { return a + b; }
};
struct Everywhere {
  float a;
  float get() const device { return a; }
  float get() const thread { return a; }
};
struct Args {
  float scale;
};

constant float table[2] = {1, 2};

kernel void spaces(device float* x [[buffer(0)]], device const float* y [[buffer(1)]],
                   constant Args& args [[buffer(2)]], device Pair* pairs [[buffer(3)]],
                   device Everywhere* all [[buffer(4)]], uint i [[thread_position_in_grid]],
                   int k [[thread_index_in_threadgroup]]) {
  threadgroup float room[32];
  float mine[4] = {};
  x[0] = first_of(y) + first_of_room(room) + args.scale + table[1];
  x[1] = first_of(room);         // refused
  x[2] = first_of_room(x);       // refused
  x[3] = first_of(table);        // refused
  x[4] = first_of(mine);         // refused
  x[5] = first_of(&args.scale);  // refused
  put(x[6], 1);                  // refused
  put(mine[0], 1);
  device float* there = room;  // refused
  threadgroup float* here = room + 1;
  here = x;  // refused
  const device float* again = x;
  thread float* own = mine;
  own = again;     // refused
  y[0] = 1;        // refused
  args.scale = 2;  // refused
  table[0] = 2;    // refused
  const Pair pair = pairs[i];
  x[7] = pair.sum() + pairs[i].a;
  x[8] = pairs[i].sum();  // refused
  x[9] = all[i].get();
  x[10] = float(min(i, k));  // refused
  x[11] = float(min(i, uint(k)));
  float4 four = float4(half4(1));
  half4 halves = four;  // refused
  x[12] = erf(x[0]);    // refused
  x[13] = *there + *here + *own + float(halves.x);
  float (*choose)(device const float*) = first_of;  // refused
}
