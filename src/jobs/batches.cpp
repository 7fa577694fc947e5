// Batches of samples, and their order.
#include <algorithm>
#include <numeric>
#include <span>

#include "hash.h"
#include "mlxtape/base/checked.h"
#include "mlxtape/jobs/dataset.h"
#include "permutations.h"

namespace mlxtape::jobs {

namespace {

// As Python sorts: equal lengths stay in their order.
std::vector<const Sample*> ordered(const std::vector<Sample>& samples,
                                   const BatchOptions& options) {
  std::vector<const Sample*> order;
  order.reserve(samples.size());
  for (const Sample& sample : samples) order.push_back(&sample);
  if (!options.by_length) return order;
  std::stable_sort(order.begin(), order.end(), [](const Sample* a, const Sample* b) {
    return a->tokens.size() < b->tokens.size();
  });
  return order;
}

std::int64_t tokens_of(const Sample& sample, const BatchOptions& options) {
  return std::min(static_cast<std::int64_t>(sample.tokens.size()), options.max_tokens);
}

// The first target that counts: token i is target i − 1.
std::int64_t first_learned(const Sample& sample, const BatchOptions& options) {
  return options.learn_prompt ? 0 : std::max<std::int64_t>(sample.prompt - 1, 0);
}

Batch make_batch(std::span<const Sample* const> samples, const BatchOptions& options) {
  Batch batch;
  batch.rows = static_cast<std::int64_t>(samples.size());
  std::int64_t longest = 0;
  for (const Sample* sample : samples) longest = std::max(longest, tokens_of(*sample, options));
  batch.length =
      std::min(ceil_div(longest, options.pad_to) * options.pad_to, options.max_tokens - 1);
  const auto size = static_cast<std::size_t>(batch.rows * batch.length);
  batch.tokens.assign(size, 0);
  batch.targets.assign(size, -1);
  std::size_t row = 0;
  for (const Sample* sample : samples) {
    const std::int64_t n = tokens_of(*sample, options) - 1;
    const std::int64_t first = first_learned(*sample, options);
    for (std::int64_t i = 0; i < n; ++i) {
      const auto at = static_cast<std::size_t>(i);
      batch.tokens[row + at] = sample->tokens[at];
      if (i < first) continue;
      batch.targets[row + at] = sample->tokens[at + 1];
      ++batch.counted;
    }
    row += static_cast<std::size_t>(batch.length);
  }
  return batch;
}

}  // namespace

Check batch_check(const BatchOptions& options) {
  const auto wrong = [](const char* what, std::int64_t got) {
    return Error(Errc::kArgument, std::string("batches: ") + what + ", got " + std::to_string(got));
  };
  if (options.batch_size < 1) return wrong("batch_size must be at least 1", options.batch_size);
  if (options.pad_to < 1) return wrong("pad_to must be at least 1", options.pad_to);
  if (options.max_tokens < 2) return wrong("max_tokens must be at least 2", options.max_tokens);
  return std::nullopt;
}

struct Batches::Impl {
  std::vector<Sample> owned;  // none, where they are the caller's
  BatchOptions options;
  std::vector<const Sample*> order;
  std::int64_t per_epoch = 0;

  void set(const std::vector<Sample>& samples, const BatchOptions& given);

  // The order of an epoch; to go back one begins again.
  std::span<const std::int64_t> of_epoch(std::int64_t wanted) {
    if (epoch > wanted) {
      epoch = -1;
      random = Permutations(options.seed);
    }
    for (; epoch < wanted; ++epoch) permutation = random.next(per_epoch);
    return permutation;
  }
  std::span<const Sample* const> group(std::int64_t number) const {
    const auto rows = static_cast<std::size_t>(options.batch_size);
    return std::span(order).subspan(static_cast<std::size_t>(number) * rows, rows);
  }

  Permutations random{0};
  std::vector<std::int64_t> permutation;
  std::int64_t epoch = -1;  // that permutation is of
};

void Batches::Impl::set(const std::vector<Sample>& samples, const BatchOptions& given) {
  require(batch_check(given));
  if (static_cast<std::int64_t>(samples.size()) < given.batch_size) {
    const std::string got = std::to_string(samples.size());
    throw Error(Errc::kArgument,
                "batches: there must be at least batch_size = " + std::to_string(given.batch_size) +
                    " samples, got " + got + (samples.empty() ? "" : "; use --batch-size " + got));
  }
  options = given;
  order = ordered(samples, options);
  per_epoch = static_cast<std::int64_t>(samples.size()) / options.batch_size;
  random = Permutations(options.seed);
  const auto learns = [&](const Sample* sample) {
    return first_learned(*sample, options) < tokens_of(*sample, options) - 1;
  };
  if (std::none_of(order.begin(), order.end(), learns)) {
    throw Error(
        Errc::kArgument,
        "batches: a sample must have tokens that the loss counts, got samples whose first " +
            std::to_string(options.max_tokens) + " tokens are all prompt");
  }
}

Batches::Batches(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Batches::Batches(std::vector<Sample> samples, const BatchOptions& options)
    : impl_(std::make_unique<Impl>()) {
  impl_->owned = std::move(samples);
  impl_->set(impl_->owned, options);
}

Batches Batches::of(const std::vector<Sample>& samples, const BatchOptions& options) {
  auto impl = std::make_unique<Impl>();
  impl->set(samples, options);
  return Batches(std::move(impl));
}

Batches::~Batches() = default;
Batches::Batches(Batches&&) noexcept = default;
Batches& Batches::operator=(Batches&&) noexcept = default;

std::int64_t Batches::per_epoch() const { return impl_->per_epoch; }

Batch Batches::at(std::int64_t i) const {
  if (i < 0) {
    throw Error(Errc::kArgument,
                "batches: a batch's number must be at least 0, got " + std::to_string(i));
  }
  const auto order = impl_->of_epoch(i / impl_->per_epoch);
  const auto place = static_cast<std::size_t>(i % impl_->per_epoch);
  return make_batch(impl_->group(order[place]), impl_->options);
}

std::string Batches::fingerprint() const {
  Hash hash;
  hash.add(impl_->options.seed);
  hash.add(impl_->options.batch_size);
  for (std::int64_t b = 0; b < impl_->per_epoch; ++b) {
    std::int64_t longest = 0;
    for (const Sample* sample : impl_->group(b)) {
      const std::int64_t n = tokens_of(*sample, impl_->options);
      longest = std::max(longest, n);
      hash.add(n);
      hash.add(std::min(first_learned(*sample, impl_->options), n));
      for (std::int64_t t = 0; t < n; ++t) hash.add(sample->tokens[static_cast<std::size_t>(t)]);
    }
    hash.add(std::min(ceil_div(longest, impl_->options.pad_to) * impl_->options.pad_to,
                      impl_->options.max_tokens - 1));
  }
  return hash.digits();
}

std::vector<Batch> every_batch(const std::vector<Sample>& samples, const BatchOptions& options) {
  require(batch_check(options));
  const std::vector<const Sample*> order = ordered(samples, options);
  std::vector<Batch> batches;
  for (std::size_t at = 0; at < order.size();) {
    const std::size_t rows =
        std::min(order.size() - at, static_cast<std::size_t>(options.batch_size));
    batches.push_back(make_batch(std::span(order).subspan(at, rows), options));
    at += rows;
  }
  return batches;
}

DataSet pick_samples(const std::vector<Sample>& samples, std::int64_t train, std::int64_t valid,
                     std::uint32_t seed) {
  if (train < 1 || valid < 1) {
    throw Error(Errc::kArgument,
                "data: at least one sample is needed for training and one for validation, got " +
                    std::to_string(train) + " and " + std::to_string(valid));
  }
  const auto all = static_cast<std::int64_t>(samples.size());
  if (all < 2) {
    throw Error(
        Errc::kArgument,
        "data: there must be at least 2 samples, one for training and one for validation, got " +
            std::to_string(all));
  }
  if (all - valid < train) {
    valid = std::clamp<std::int64_t>(all / 8, 1, valid);
    train = std::min(train, all - valid);
  }
  const std::vector<std::int64_t> order = Permutations(seed).next(all);
  DataSet picked;
  for (std::int64_t i = 0; i < train + valid; ++i) {
    const auto from = static_cast<std::size_t>(order[static_cast<std::size_t>(i)]);
    (i < train ? picked.train : picked.valid).push_back(samples[from]);
  }
  return picked;
}

std::string fingerprint(const std::vector<Batch>& batches) {
  Hash hash;
  for (const Batch& batch : batches) {
    hash.add(batch.rows);
    hash.add(batch.length);
    for (const std::int32_t token : batch.tokens) hash.add(token);
    for (const std::int32_t target : batch.targets) hash.add(target);
  }
  return hash.digits();
}

}  // namespace mlxtape::jobs
