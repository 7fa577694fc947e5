// CPU kernels of sample (formula and layout: mlxtape/ops/sample.h).
//
// A row is cut into parts, and all parts of up to 16 rows take each step together: the largest logit; with bias or
// penalties a copy that has them, and its largest; with top_p or top_k the mass of 512 bins of d, which of them holds
// the last place that is kept, and the places in it, one in a hundred, of which the last is found by their digits; the
// mass of what is kept; and the part, the piece and the token that the drawn number falls into. Integers are summed, so
// any cut gives the same. Bound by the arithmetic of the weights and, with top_p, by adding to bins one by one.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/sample/sample.cpu.cpp"
#include <hwy/foreach_target.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "backends/cpu/device/simd-inl.h"
#include "backends/cpu/device/tasks.h"
#include "mlxtape/base/dtype.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"
#include "sample_args.h"
#include "sample_passes-inl.h"
#include "sample_rows.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

using sampling::kPart;
using sampling::Part;
using sampling::Row;

constexpr std::int64_t kTogether = 16;  // rows
constexpr std::int64_t kPiece = 256;    // tokens
constexpr std::uint64_t kAllPlaces = ~std::uint64_t{0};

std::int64_t parts_of(const SampleArgs& a) { return ceil_div(a.vocabulary, kPart); }

std::size_t workspace(const void* args) {
  const auto& a = *static_cast<const SampleArgs*>(args);
  const auto rows = static_cast<std::size_t>(std::min(kTogether, a.rows));
  const auto tokens = static_cast<std::size_t>(a.vocabulary);
  return rows * (sizeof(Row) + static_cast<std::size_t>(parts_of(a)) * sizeof(Part) +
                 tokens * (sizeof(std::uint64_t) + sizeof(float)));
}

template <class T>
class Sampling {
 public:
  explicit Sampling(const KernelCall& call)
      : args_(call.as<SampleArgs>()), call_(call), parts_each_(parts_of(args_)) {
    const std::int64_t rows = std::min(kTogether, args_.rows);
    rows_ = static_cast<Row*>(call.workspace);
    parts_ = reinterpret_cast<Part*>(rows_ + rows);
    places_ = reinterpret_cast<std::uint64_t*>(parts_ + rows * parts_each_);
    z_ = reinterpret_cast<float*>(places_ + rows * args_.vocabulary);
  }

  // Up to kTogether rows from `first` on.
  void run(std::int64_t first, std::int64_t count) {
    first_ = first;
    count_ = count;
    for_rows([&](std::int64_t r) { begin(r); });
    for_parts([](const Row&) { return true; },
              [&](std::int64_t r, std::int64_t p) {
                Part& part = part_of(r, p);
                const T* x = logits(r) + p * kPart;
                part.raw_max = part.max = largest_logit(x, length(p));
                if (rows_[r].changed) copy_logits(x, length(p), changed(r) + p * kPart);
              });
    for_rows([&](std::int64_t r) { change(r); });
    const bool whole = args_.logprobs != 0;
    for_parts([&](const Row& row) { return whole || row.changed; },
              [&](std::int64_t r, std::int64_t p) { look(r, p); });
    for_rows([&](std::int64_t r) { decide(r); });
    const auto searched = [](const Row& row) {
      return row.searched;
    };
    for_parts(searched, [&](std::int64_t r, std::int64_t p) {
      with_z(r, [&](const auto* z) HWY_ATTR {
        fill_bins(z + p * kPart, length(p), rows_[r].max, part_of(r, p).bins);
      });
    });
    for_rows([&](std::int64_t r) { narrow_to_bin(r); });
    for_parts(searched, [&](std::int64_t r, std::int64_t p) { collect(r, p); });
    for_rows([&](std::int64_t r) { find_last(r); });
    for_parts([](const Row& row) { return row.drawn; },
              [&](std::int64_t r, std::int64_t p) {
                part_of(r, p).mass = mass_of(r, p * kPart, length(p));
              });
    for_rows([&](std::int64_t r) { finish(r); });
  }

 private:
  template <class Body>
  void for_rows(const Body& body) {
    parallel_for(count_, body);
  }
  // Of the rows that are wanted.
  template <class Wanted, class Body>
  void for_parts(const Wanted& wanted, const Body& body) {
    std::int64_t which[kTogether];
    std::int64_t n = 0;
    for (std::int64_t r = 0; r < count_; ++r) {
      if (wanted(rows_[r])) which[n++] = r;
    }
    parallel_for(n * parts_each_,
                 [&](std::int64_t task) { body(which[task / parts_each_], task % parts_each_); });
  }

  const T* logits(std::int64_t r) const {
    return call_.input<T>(0) + (first_ + r) * args_.vocabulary;
  }
  float* changed(std::int64_t r) const { return z_ + r * args_.vocabulary; }
  Part& part_of(std::int64_t r, std::int64_t p) const { return parts_[r * parts_each_ + p]; }
  std::int64_t length(std::int64_t p) const {
    return std::min(kPart, args_.vocabulary - p * kPart);
  }
  std::int32_t* history(std::int64_t r) const {
    return static_cast<std::int32_t*>(args_.append != 0 ? call_.out[4] : call_.in[3]) +
           (first_ + r) * args_.room;
  }
  std::int32_t* stored_length(std::int64_t r) const {
    return static_cast<std::int32_t*>(args_.append != 0 ? call_.out[5] : call_.in[4]) + first_ + r;
  }
  // body(z of the row), which is x where nothing was added.
  template <class Body>
  auto with_z(std::int64_t r, const Body& body) const {
    return rows_[r].changed ? body(static_cast<const float*>(changed(r))) : body(logits(r));
  }
  std::uint64_t mass_of(std::int64_t r, std::int64_t token, std::int64_t n) const {
    const Row& row = rows_[r];
    return with_z(r, [&](const auto* z) HWY_ATTR {
      return mass_up_to(z + token, n, token, row.max, row.slope, row.last);
    });
  }

  void begin(std::int64_t r) {
    Row& row = rows_[r];
    row.settings = sampling::settings_of(call_.input<float>(1) + (first_ + r) * 6,
                                         call_.input<std::int32_t>(2) + (first_ + r) * 6);
    row.windows = sampling::windows_of(row.settings, *stored_length(r), args_.room);
    const std::int32_t* ids = bias_ids(r);
    row.changed = row.windows.any() ||
                  std::any_of(ids, ids + args_.biases, [](std::int32_t id) { return id >= 0; });
  }
  const std::int32_t* bias_ids(std::int64_t r) const {
    return args_.biases == 0 ? nullptr : call_.input<std::int32_t>(5) + (first_ + r) * args_.biases;
  }

  void change(std::int64_t r) {
    Row& row = rows_[r];
    row.raw_max = -INFINITY;
    for (std::int64_t p = 0; p < parts_each_; ++p) {
      row.raw_max = std::max(row.raw_max, part_of(r, p).raw_max);
    }
    row.raw_max += 0.0F;  // no −0, from which d would be one
    if (!row.changed) return;
    if (args_.biases != 0) {
      sampling::add_biases(bias_ids(r), call_.input<float>(6) + (first_ + r) * args_.biases,
                           args_.biases, changed(r), args_.vocabulary);
    }
    if (!row.windows.any()) return;
    auto* room = reinterpret_cast<std::uint32_t*>(
        cpu::thread_scratch(row.windows.end - row.windows.begin()));
    sampling::add_penalties(row, history(r), changed(r), args_.vocabulary, room);
  }

  // What the row's probabilities and its changed logits are made of.
  void look(std::int64_t r, std::int64_t p) {
    const Row& row = rows_[r];
    Part& part = part_of(r, p);
    const std::int64_t token = p * kPart;
    if (row.changed) part.max = largest_logit(changed(r) + token, length(p));
    if (args_.logprobs == 0 || !std::isfinite(row.raw_max)) return;
    const T* x = logits(r) + token;
    part.raw_mass = mass_up_to(x, length(p), token, row.raw_max, -sampling::kLog2E, kAllPlaces);
    part.listed = 0;
    if (args_.top == 0) return;
    float upto = std::numeric_limits<float>::max();
    for_places(x, length(p), token, row.raw_max, 0, upto, [&](std::uint64_t place) {
      if (part.listed == sampling::kListed && place > part.list.back()) return;
      sampling::enlist(place, part.list, part.listed);
      if (part.listed == sampling::kListed) upto = sampling::d_of(part.list.back());
    });
  }

  void decide(std::int64_t r) {
    Row& row = rows_[r];
    row.max = -INFINITY;
    for (std::int64_t p = 0; p < parts_each_; ++p) row.max = std::max(row.max, part_of(r, p).max);
    row.max += 0.0F;
    const bool good = std::isfinite(row.max) && std::isfinite(row.raw_max);
    row.good = good;
    row.drawn = good && !row.settings.greedy();
    row.searched = good && row.settings.searches();
    row.slope = row.drawn ? sampling::slope_of(row.settings.temperature) : 0;
    row.last = row.settings.last_in_reach();
  }

  void narrow_to_bin(std::int64_t r) {
    Row& row = rows_[r];
    if (!row.searched) return;
    std::array<sampling::Bin, sampling::kBins> bins = part_of(r, 0).bins;
    for (std::int64_t p = 1; p < parts_each_; ++p) {
      for (std::size_t b = 0; b < sampling::kBins; ++b) {
        bins[b].mass += part_of(r, p).bins[b].mass;
        bins[b].tokens += part_of(r, p).bins[b].tokens;
      }
    }
    sampling::choose_bin(row, bins);
  }
  void collect(std::int64_t r, std::int64_t p) {
    const Row& row = rows_[r];
    const float from = static_cast<float>(row.bin) / sampling::kBinsOfUnit;
    const float next = static_cast<float>(row.bin + 1) / sampling::kBinsOfUnit;
    const float upto = row.bin + 1 == sampling::kBins ? INFINITY : std::nextafter(next, 0.0F);
    std::uint64_t* const places = places_ + r * args_.vocabulary + p * kPart;
    std::uint64_t* end = places;
    with_z(r, [&](const auto* z) HWY_ATTR {
      for_places(z + p * kPart, length(p), p * kPart, row.max, from, upto,
                 [&](std::uint64_t place) { *end++ = place; });
    });
    part_of(r, p).candidates = end - places;
  }
  void find_last(std::int64_t r) {
    Row& row = rows_[r];
    if (!row.searched) return;
    std::uint64_t* const places = places_ + r * args_.vocabulary;
    std::int64_t n = 0;
    for (std::int64_t p = 0; p < parts_each_; ++p) {
      const std::int64_t some = part_of(r, p).candidates;
      std::copy(places + p * kPart, places + p * kPart + some, places + n);
      n += some;
    }
    row.last = std::min(row.last, sampling::last_place(row, places, n));
  }

  std::int64_t most_likely(std::int64_t r) const {
    std::int64_t p = 0;
    while (part_of(r, p).max != rows_[r].max) ++p;
    return p * kPart + with_z(r, [&](const auto* z) HWY_ATTR {
             return first_equal(z + p * kPart, length(p), rows_[r].max);
           });
  }
  std::int64_t draw(std::int64_t r) const {
    const Row& row = rows_[r];
    std::uint64_t all = 0;
    for (std::int64_t p = 0; p < parts_each_; ++p) all += part_of(r, p).mass;
    std::uint64_t rest = sampling::product_high(
        sampling::random_of(row.settings, static_cast<std::uint32_t>(*stored_length(r))), all);
    std::int64_t token = 0;
    for (; part_of(r, token / kPart).mass <= rest; token += kPart) {
      rest -= part_of(r, token / kPart).mass;
    }
    const std::int64_t end = std::min(args_.vocabulary, token + kPart);
    for (;; token += kPiece) {
      const std::uint64_t some = mass_of(r, token, std::min(kPiece, end - token));
      if (some > rest) break;
      rest -= some;
    }
    return with_z(r, [&](const auto* z) {
      for (;; ++token) {
        const float d = row.max - sampling::counted(static_cast<float>(z[token]));
        const std::uint64_t place =
            sampling::place_of(std::bit_cast<std::uint32_t>(d), static_cast<std::uint32_t>(token));
        const std::uint64_t w = place <= row.last ? sampling::weight(d, row.slope) : 0;
        if (w > rest) return token;
        rest -= w;
      }
    });
  }

  void finish(std::int64_t r) {
    const Row& row = rows_[r];
    const std::int64_t token = !row.good ? -1 : row.drawn ? draw(r) : most_likely(r);
    const std::int64_t b = first_ + r;
    call_.output<std::int32_t>(0)[b] = static_cast<std::int32_t>(token);
    if (args_.logprobs != 0) write_logprobs(r, token);
    if (args_.append == 0 || token < 0) return;
    std::int32_t& length = *stored_length(r);
    if (length >= 0 && length < args_.room) history(r)[length] = static_cast<std::int32_t>(token);
    ++length;
  }
  void write_logprobs(std::int64_t r, std::int64_t token) {
    const Row& row = rows_[r];
    auto* chosen = call_.output<float>(1) + first_ + r;
    std::uint64_t all = 0;
    std::array<std::uint64_t, sampling::kListed> list;
    std::int64_t listed = 0;
    for (std::int64_t p = 0; row.good && p < parts_each_; ++p) {
      const Part& part = part_of(r, p);
      all += part.raw_mass;
      for (std::int64_t i = 0; i < part.listed; ++i) {
        const std::uint64_t place = part.list[static_cast<std::size_t>(i)];
        if (listed == sampling::kListed && place > list.back()) break;
        sampling::enlist(place, list, listed);
      }
    }
    const double log_sum = std::log(static_cast<double>(all) * 0x1p-40);
    const auto logprob = [&](float d) {
      return row.good ? static_cast<float>(-static_cast<double>(d) - log_sum) : NAN;
    };
    *chosen = row.good
                  ? logprob(row.raw_max - sampling::counted(static_cast<float>(logits(r)[token])))
                  : NAN;
    if (args_.top == 0) return;
    auto* ids = call_.output<std::int32_t>(2) + (first_ + r) * 20;
    auto* logprobs = call_.output<float>(3) + (first_ + r) * 20;
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(sampling::kListed); ++i) {
      const bool is = i < listed;
      const std::uint64_t place = is ? list[static_cast<std::size_t>(i)] : 0;
      ids[i] = is ? static_cast<std::int32_t>(place & 0xffffffffU) : -1;
      logprobs[i] = logprob(is ? sampling::d_of(place) : INFINITY);
    }
  }

  const SampleArgs& args_;
  const KernelCall& call_;
  std::int64_t parts_each_, first_ = 0, count_ = 0;
  Row* rows_;              // [count]
  Part* parts_;            // [count, parts]
  std::uint64_t* places_;  // [count, V]
  float* z_;               // [count, V]
};

template <class T>
void sample_fwd(const KernelCall& call) {
  const std::int64_t rows = call.as<SampleArgs>().rows;
  Sampling<T> sampling(call);
  for (std::int64_t r = 0; r < rows; r += kTogether) {
    sampling.run(r, std::min(kTogether, rows - r));
  }
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  registry.add(Backend::kCpu, std::string("sample_fwd_") + name_of(kDType<T>), sample_fwd<T>,
               workspace);
}

}  // namespace

void register_sample(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(sample)
