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

#include "mlxtape/core/encoder.h"

namespace mlxtape {

class Saved {
 public:
  static constexpr std::size_t kMostArgs = 256;  // bytes

  Saved() = default;
  Saved(std::initializer_list<TensorRef> tensors) {
    keep(std::span(tensors.begin(), tensors.size()));
  }
  explicit Saved(const std::vector<Tensor>& tensors) { keep(std::span<const Tensor>(tensors)); }
  template <class Args>
  Saved(std::initializer_list<TensorRef> tensors, const Args& args) : Saved(tensors) {
    set_args(args);
  }
  template <class Args>
  Saved(const std::vector<Tensor>& tensors, const Args& args) : Saved(tensors) {
    set_args(args);
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

  // The first tensor whose memory was written since it was saved, or -1. A replay counts as a write of all of
  // an arena's memory that it has places in.
  int changed() const;

 private:
  struct Kept {
    Tensor tensor;
    std::uint32_t version;
    Kept(const Tensor& t, std::uint32_t v) : tensor(t), version(v) {}
  };
  template <class Args>
  void set_args(const Args& args) {
    static_assert(std::is_trivially_copyable_v<Args>, "plain data: tensors go into the list");
    static_assert(sizeof(Args) <= kMostArgs);
    std::memcpy(args_.data(), &args, sizeof(Args));
    args_bytes_ = sizeof(Args);
  }
  static std::uint32_t version_of(const Tensor& t);
  template <class List>
  void keep(const List& tensors) {
    tensors_.reserve(tensors.size());
    for (const Tensor& t : tensors) tensors_.emplace_back(t, version_of(t));
  }

  std::vector<Kept> tensors_;
  alignas(16) std::array<std::byte, kMostArgs> args_;  // NOLINT: args_bytes_ of them are set
  std::size_t args_bytes_ = 0;
};

}  // namespace mlxtape
