#include "mlxtape/models/finite.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "mlxtape/core/encoder.h"
#include "mlxtape/core/threads.h"
#include "mlxtape/models/lora.h"

namespace mlxtape::models {

namespace {

constexpr std::int64_t kBlock = std::int64_t{1} << 17;  // numbers of a task: some 20 us

// Of a number that is NaN or infinite every bit of the exponent is set, and of no other.
template <class Bits>
std::int64_t count(const void* data, std::int64_t size, Bits exponent) {
  const auto* const all = static_cast<const Bits*>(data);
  std::atomic<std::int64_t> found{0};
  parallel_for((size + kBlock - 1) / kBlock, [&](std::int64_t task) {
    const Bits* const from = all + task * kBlock;
    const std::int64_t n = std::min(kBlock, size - task * kBlock);
    // Without a branch or a wider sum, so that it becomes vectors: there is hardly ever anything to count.
    Bits any = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      any = static_cast<Bits>(any | static_cast<Bits>((from[i] & exponent) == exponent));
    }
    if (any == 0) return;
    found +=
        std::count_if(from, from + n, [&](Bits bits) { return (bits & exponent) == exponent; });
  });
  return found;
}

std::int64_t count(const void* data, std::int64_t size, DType dtype) {
  switch (dtype) {
    case DType::kF16: return count<std::uint16_t>(data, size, 0x7C00U);
    case DType::kBF16: return count<std::uint16_t>(data, size, 0x7F80U);
    case DType::kF32: return count<std::uint32_t>(data, size, 0x7F800000U);
    case DType::kF64: return count<std::uint64_t>(data, size, 0x7FF0000000000000U);
    default: return 0;
  }
}

void add(NonFinite& to, const std::string& name, std::int64_t numbers) {
  if (numbers == 0) return;
  if (++to.tensors > 1) return;
  to.first = name;
  to.numbers = numbers;
}

}  // namespace

std::string NonFinite::text() const {
  const std::int64_t others = tensors - 1;
  return "the tensor " + first + " has " + std::to_string(numbers) +
         (numbers == 1 ? " value that is" : " values that are") + " NaN or infinite" +
         (others == 0   ? ""
          : others == 1 ? ", as has 1 more tensor"
                        : ", as have " + std::to_string(others) + " more tensors");
}

std::int64_t count_nonfinite(const Tensor& tensor) {
  if (!is_float(tensor.dtype())) return 0;
  return count(tensor.data(), tensor.size(), tensor.dtype());
}

NonFinite find_nonfinite(CommandEncoder& encoder, const Model& model) {
  std::vector<Parameter> all = parameters(model);
  for (Parameter& adapter : lora_parameters(model)) all.push_back(std::move(adapter));
  return find_nonfinite(encoder, all);
}

NonFinite find_nonfinite(CommandEncoder& encoder, const std::vector<Parameter>& tensors) {
  NonFinite result;
  std::vector<unsigned char> copy;
  encoder.commit_and_wait();
  for (const Parameter& p : tensors) {
    if (!is_float(p.tensor.dtype())) continue;
    if (encoder.device().limits().host_visible && p.tensor.is_contiguous()) {
      add(result, p.name, count_nonfinite(p.tensor));
      continue;
    }
    const Tensor whole = encoder.contiguous(p.tensor);
    copy.resize(whole.bytes());
    encoder.download(whole, copy.data(), copy.size());
    add(result, p.name, count(copy.data(), whole.size(), whole.dtype()));
  }
  return result;
}

NonFinite find_nonfinite(const formats::ModelFiles& files,
                         const std::function<void(std::size_t done)>& progress) {
  NonFinite result;
  std::size_t done = 0;
  for (const std::string& name : files.names()) {
    const formats::TensorInfo& info = files.info(name);
    if (info.dtype && is_float(*info.dtype)) {
      add(result, name, count_nonfinite(files.tensor(name)));
    }
    done += info.bytes;
    if (progress) progress(done);
  }
  return result;
}

}  // namespace mlxtape::models
