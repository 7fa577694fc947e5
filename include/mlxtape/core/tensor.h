// Tensor: a Buffer read as an N-dimensional array: element type, shape, strides, offset.
// A Tensor is a value; copies and views share the memory. Every view is checked against the
// extent of its buffer when it is made, so no Tensor reaches outside.
//
// Threads    As Buffer: copies on any threads at once; one object is not assigned while read.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "mlxtape/base/dtype.h"
#include "mlxtape/base/shape.h"
#include "mlxtape/core/buffer.h"

namespace mlxtape {

enum class Backend : std::uint8_t { kCpu, kCuda, kMetal };
inline constexpr std::size_t kBackendCount = 3;
const char* name_of(Backend backend) noexcept;  // "cpu", "cuda", "metal"

class Tensor {
 public:
  Tensor() = default;  // no memory, shape []; defined() is false

  // offset and strides count elements. Throws kShape if any element lies outside buffer.
  Tensor(Buffer buffer, DType dtype, Shape shape);  // contiguous, from the buffer's start
  Tensor(Buffer buffer, DType dtype, Shape shape, Strides strides, std::int64_t offset);

  // A tensor with everything but memory: for validators and planners.
  static Tensor meta(Shape shape, DType dtype = DType::kF32, Backend backend = Backend::kCpu);

  // Memory of the host used in place by the cpu device; it must outlive every copy, or done says
  // when the last is gone.
  template <class T>
  static Tensor wrap(T* values, Shape shape, std::function<void()> done = {}) {
    return wrap_host(values, kDType<T>, std::move(shape), std::move(done));
  }

  bool defined() const { return defined_; }
  bool has_memory() const { return static_cast<bool>(buffer_); }
  Backend backend() const { return backend_; }
  Device* device() const { return buffer_.device(); }
  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  const Strides& strides() const { return strides_; }
  std::int64_t rank() const { return shape_.rank(); }
  std::int64_t dim(std::int64_t i) const { return shape_[i]; }  // i in [0, rank)
  std::int64_t size() const { return size_; }                   // elements
  std::size_t bytes() const { return static_cast<std::size_t>(size_) * size_of(dtype_); }
  const Buffer& buffer() const { return buffer_; }
  std::int64_t offset() const { return offset_; }
  bool is_contiguous() const;

  // Who this is on a tape (tape/tape.h): 0 is nobody. A view that a tape does not know of has the number of
  // what it views, and is loose.
  std::uint64_t identity() const { return identity_ & ~kLoose; }
  bool is_loose() const { return (identity_ & kLoose) != 0; }
  Tensor detach() const;  // the same tensor, nobody

  // The first element's address on the device; null when there is no element.
  void* data() const {
    return size_ == 0 ? nullptr
                      : static_cast<char*>(buffer_.address()) +
                            offset_ * static_cast<std::int64_t>(size_of(dtype_));
  }

  // Views: same memory, nothing copied.
  Tensor reshape(Shape shape) const;  // contiguous tensors only; same element count
  Tensor transpose(std::initializer_list<std::int64_t> order) const;  // a permutation of the axes
  Tensor slice(std::int64_t axis, std::int64_t start, std::int64_t stop,
               std::int64_t step = 1) const;  // 0 <= start <= stop <= dim; step >= 1
  Tensor select(std::int64_t axis, std::int64_t index) const;  // drops the axis
  Tensor broadcast_to(Shape shape) const;  // strides of 0 where a 1 is stretched

  // The elements on the host: T must be the tensor's type, the tensor contiguous and its memory
  // visible to the host. Work that a device still has to do is the caller's to wait for.
  template <class T>
  std::span<T> host() const {
    check_host(kDType<T>);
    return {static_cast<T*>(data()), static_cast<std::size_t>(size_)};
  }

 private:
  friend class CommandEncoder;
  friend class Tape;
  static constexpr std::uint64_t kLoose = std::uint64_t{1} << 63U;
  Tensor loose() const;
  static Tensor wrap_host(void* values, DType dtype, Shape shape, std::function<void()> done);
  void check_host(DType asked) const;

  Buffer buffer_;
  Shape shape_;
  Strides strides_;
  std::int64_t offset_ = 0;
  std::uint64_t identity_ = 0;
  std::int64_t size_ = 0;
  DType dtype_ = DType::kF32;
  Backend backend_ = Backend::kCpu;
  bool defined_ = false;
};

using TensorRef = std::reference_wrapper<const Tensor>;

}  // namespace mlxtape
