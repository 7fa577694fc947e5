// Each task takes its share of every array: line by line it reads one vector of each input and
// writes one of each output, in proportion when the arrays differ in length.
#include "floor.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "floor.cpp"
#include <hwy/foreach_target.h>

#include <atomic>

#include "backends/cpu/device/simd-inl.h"
#include "backends/cpu/device/tasks.h"
#include "mlxtape/core/threads.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::bench {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

float move(const FloorPart* reads, int read_count, const FloorPart* writes, int write_count,
           bool stream) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  auto seen = hn::Zero(d);
  const std::int64_t in = read_count == 0 ? 0 : reads[0].vectors;
  const std::int64_t out = write_count == 0 ? 0 : writes[0].vectors;
  const std::int64_t steps = std::max(in, out);
  // The common cases as plain loops; the compiler cannot see through a count of arrays.
  if (read_count == 1 && write_count == 1 && in == out && stream) {
    for (std::int64_t i = 0; i < steps; ++i) {
      hn::Stream(hn::Load(d, reads[0].at + i * lanes), d, writes[0].at + i * lanes);
    }
    return 0;
  }
  if (read_count == 2 && write_count == 1 && in == out && stream) {
    for (std::int64_t i = 0; i < steps; ++i) {
      hn::Stream(
          hn::Add(hn::Load(d, reads[0].at + i * lanes), hn::Load(d, reads[1].at + i * lanes)), d,
          writes[0].at + i * lanes);
    }
    return 0;
  }
  constexpr std::int64_t kRun = 64;  // vectors of one array before the next has its turn
  for (std::int64_t i = 0; i < steps; i += kRun) {
    const std::int64_t to = std::min(steps, i + kRun);
    for (int r = 0; r < read_count; ++r) {
      for (std::int64_t v = i * in / steps; v < to * in / steps; ++v) {
        seen = hn::Add(seen, hn::Load(d, reads[r].at + v * lanes));
      }
    }
    for (int w = 0; w < write_count; ++w) {
      for (std::int64_t v = i * out / steps; v < to * out / steps; ++v) {
        if (stream) {
          hn::Stream(seen, d, writes[w].at + v * lanes);
        } else {
          hn::Store(seen, d, writes[w].at + v * lanes);
        }
      }
    }
  }
  return hn::GetLane(hn::SumOfLanes(d, seen));
}

std::int64_t vector_floats() {
  return static_cast<std::int64_t>(hn::Lanes(hn::ScalableTag<float>()));
}

}  // namespace HWY_NAMESPACE
}  // namespace mlxtape::bench
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mlxtape::bench {

HWY_EXPORT(move);
HWY_EXPORT(vector_floats);

namespace {

constexpr int kMostStreams = 8;

std::atomic<float> sink;  // somebody might read it, so the loads must be done

}  // namespace

Floor::Floor(Device& device, std::int64_t read_bytes, int read_streams, std::int64_t write_bytes,
             int write_streams) {
  const auto add = [&](std::vector<Tensor>& to, std::int64_t bytes, int streams) {
    for (int i = 0; i < streams && bytes > 0; ++i) {
      const std::int64_t floats = std::max<std::int64_t>(bytes / streams / 4, 64);
      Tensor t = device.empty({floats}, DType::kF32);
      for (float& v : t.host<float>()) v = 1;
      to.push_back(std::move(t));
    }
  };
  MT_ASSERT(read_streams <= kMostStreams && write_streams <= kMostStreams);
  add(reads_, read_bytes, read_streams);
  add(writes_, write_bytes, write_streams);
}

void Floor::run() const {
  std::int64_t written = 0;
  for (const Tensor& t : writes_) written += static_cast<std::int64_t>(t.bytes());
  const bool stream = written >= cpu::kStreamBytes;
  std::int64_t moved = written;
  for (const Tensor& t : reads_) moved += static_cast<std::int64_t>(t.bytes());
  const std::int64_t tasks = ceil_div(moved, cpu::kTaskBytes);
  const std::int64_t lanes = HWY_DYNAMIC_DISPATCH(vector_floats)();
  parallel_for(tasks, [&](std::int64_t task) {
    FloorPart reads[kMostStreams];
    FloorPart writes[kMostStreams];
    const auto cut = [&](const std::vector<Tensor>& arrays, FloorPart* parts) {
      for (std::size_t i = 0; i < arrays.size(); ++i) {
        const std::int64_t vectors = arrays[i].size() / lanes;
        const std::int64_t first = vectors * task / tasks;
        parts[i] = {static_cast<float*>(arrays[i].data()) + first * lanes,
                    vectors * (task + 1) / tasks - first};
      }
    };
    cut(reads_, reads);
    cut(writes_, writes);
    sink.store(HWY_DYNAMIC_DISPATCH(move)(reads, static_cast<int>(reads_.size()), writes,
                                          static_cast<int>(writes_.size()), stream),
               std::memory_order_relaxed);
    if (stream) hwy::FlushStream();
  });
}

}  // namespace mlxtape::bench
#endif
