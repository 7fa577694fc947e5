// Saved: what an op keeps from its forward pass for its backward pass: tensors and one plain struct.
// Data, not a closure, so the tape can count it, drop it and notice when it was changed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

#include "mlxtape/core/tensor.h"

namespace mlxtape {

class Saved {
 public:
  static constexpr std::size_t kMostArgs = 192;  // bytes

  Saved() = default;
  Saved(std::initializer_list<Tensor> tensors) { keep(tensors); }
  explicit Saved(const std::vector<Tensor>& tensors) { keep(tensors); }
  template <class Args>
  Saved(std::initializer_list<Tensor> tensors, const Args& args) : args_bytes_(sizeof(Args)) {
    static_assert(std::is_trivially_copyable_v<Args>, "plain data: tensors go into the list");
    static_assert(sizeof(Args) <= kMostArgs);
    std::memcpy(args_.data(), &args, sizeof(Args));
    keep(tensors);
  }

  std::size_t size() const { return tensors_.size(); }
  const Tensor& operator[](std::size_t i) const { return tensors_[i].tensor; }
  template <class Args>
  const Args& args() const {
    MT_ASSERT(sizeof(Args) == args_bytes_);
    return *reinterpret_cast<const Args*>(args_.data());
  }

  // Something else that must live as long; a checkpoint keeps its function here.
  std::shared_ptr<const void> object;

  // The first tensor whose memory was written since it was saved, or -1.
  int changed() const;

 private:
  struct Kept {
    Tensor tensor;
    std::uint32_t version;
  };
  void keep(std::span<const Tensor> tensors);

  std::vector<Kept> tensors_;
  alignas(16) std::array<std::byte, kMostArgs> args_;  // NOLINT: args_bytes_ of them are set
  std::size_t args_bytes_ = 0;
};

}  // namespace mlxtape
