#include "mlxtape/core/tensor.h"

#include "mlxtape/base/checked.h"
#include "mlxtape/core/device.h"

namespace mlxtape {

namespace {

Error wrong(const std::string& what) { return {Errc::kShape, "tensor: " + what}; }

std::int64_t count_or_throw(const Shape& shape) {
  const auto count = element_count(shape);
  if (!count) {
    throw wrong("dimensions must be 0 or more and their product under 2^63, got " +
                to_string(shape));
  }
  return *count;
}

std::int64_t axis_or_throw(std::int64_t axis, const Shape& shape) {
  const auto normal = normal_axis(axis, shape.rank());
  if (!normal) {
    throw wrong("axis must be in [-" + std::to_string(shape.rank()) + ", " +
                std::to_string(shape.rank()) + "), got " + std::to_string(axis));
  }
  return *normal;
}

// The smallest and largest element offset, both included; nothing when they do not fit 63 bits.
struct Extent {
  std::int64_t first, last;
};
std::optional<Extent> extent(const Shape& shape, const Strides& strides, std::int64_t offset) {
  Extent e{offset, offset};
  for (std::int64_t i = 0; i < shape.rank(); ++i) {
    const auto reach = checked_mul(shape[i] - 1, strides[i]);
    if (!reach) return std::nullopt;
    std::int64_t& end = *reach < 0 ? e.first : e.last;
    const auto moved = checked_add(end, *reach);
    if (!moved) return std::nullopt;
    end = *moved;
  }
  return e;
}

}  // namespace

const char* name_of(Backend backend) noexcept {
  switch (backend) {
    case Backend::kCpu: return "cpu";
    case Backend::kCuda: return "cuda";
    case Backend::kMetal: return "metal";
  }
  return "unknown";
}

Tensor::Tensor(Buffer buffer, DType dtype, Shape shape)
    : Tensor(std::move(buffer), dtype, shape, contiguous_strides(shape), 0) {}

Tensor::Tensor(Buffer buffer, DType dtype, Shape shape, Strides strides, std::int64_t offset)
    : buffer_(std::move(buffer)),
      shape_(shape),
      strides_(strides),
      offset_(offset),
      size_(count_or_throw(shape)),
      dtype_(dtype),
      backend_(buffer_ ? buffer_.device()->backend() : Backend::kCpu),
      defined_(true) {
  if (strides.rank() != shape.rank()) {
    throw wrong("one stride for each dimension of " + to_string(shape) + ", got " +
                to_string(strides));
  }
  if (size_ == 0) return;
  const auto reach = extent(shape, strides, offset);
  const auto room = static_cast<std::int64_t>(buffer_.bytes() / size_of(dtype));
  if (!reach || reach->first < 0 || reach->last >= room) {
    throw wrong(
        to_string(shape) + " " + name_of(dtype) + " with strides " + to_string(strides) +
        " from element " + std::to_string(offset) + " must lie inside its buffer of " +
        std::to_string(room) + " elements, got " +
        (reach ? "elements " + std::to_string(reach->first) + " to " + std::to_string(reach->last)
               : std::string("an extent past 2^63")));
  }
}

Tensor Tensor::meta(Shape shape, DType dtype, Backend backend) {
  Tensor t;
  t.size_ = count_or_throw(shape);
  t.strides_ = contiguous_strides(shape);
  t.shape_ = shape;
  t.dtype_ = dtype;
  t.backend_ = backend;
  t.defined_ = true;
  return t;
}

Tensor Tensor::wrap_host(void* values, DType dtype, Shape shape, std::function<void()> done) {
  const auto bytes = checked_mul(count_or_throw(shape), static_cast<std::int64_t>(size_of(dtype)));
  if (!bytes) throw wrong("size must be under 2^63 bytes, got " + to_string(shape));
  if (reinterpret_cast<std::uintptr_t>(values) % size_of(dtype) != 0) {
    throw Error(Errc::kArgument, std::string("tensor: foreign memory of ") + name_of(dtype) +
                                     " must be aligned to its element, got an odd address");
  }
  return {Buffer::wrap(Device::cpu(), values, static_cast<std::size_t>(*bytes), std::move(done)),
          dtype, shape};
}

Tensor Tensor::detach() const {
  Tensor t = *this;
  t.identity_ = 0;
  return t;
}

Tensor Tensor::loose() const {
  Tensor t = *this;
  if (t.identity_ != 0) t.identity_ |= kLoose;
  return t;
}

bool Tensor::is_contiguous() const {
  if (size_ == 0) return true;
  std::int64_t step = 1;
  for (std::int64_t i = rank() - 1; i >= 0; --i) {
    if (shape_[i] != 1 && strides_[i] != step) return false;
    step *= shape_[i];
  }
  return true;
}

Tensor Tensor::reshape(Shape shape) const {
  if (count_or_throw(shape) != size_) {
    throw wrong("reshape keeps the element count of " + to_string(shape_) + ", got " +
                to_string(shape));
  }
  if (!is_contiguous()) {
    throw wrong("reshape needs a contiguous tensor, got " + to_string(shape_) + " with strides " +
                to_string(strides_));
  }
  Tensor view = loose();
  view.shape_ = shape;
  view.strides_ = contiguous_strides(shape);
  return view;
}

Tensor Tensor::transpose(std::initializer_list<std::int64_t> order) const {
  const Dims axes(order);
  Tensor view = loose();
  unsigned seen = 0;
  for (std::int64_t i = 0; i < axes.rank() && i < rank(); ++i) {
    const std::int64_t from = axis_or_throw(axes[i], shape_);
    seen |= 1U << static_cast<unsigned>(from);
    view.shape_[i] = shape_[from];
    view.strides_[i] = strides_[from];
  }
  if (axes.rank() != rank() || seen != (1U << static_cast<unsigned>(rank())) - 1) {
    throw wrong("transpose takes each of the " + std::to_string(rank()) + " axes once, got " +
                to_string(axes));
  }
  return view;
}

Tensor Tensor::slice(std::int64_t axis, std::int64_t start, std::int64_t stop,
                     std::int64_t step) const {
  const std::int64_t a = axis_or_throw(axis, shape_);
  if (start < 0 || stop < start || stop > shape_[a] || step < 1) {
    throw wrong("slice needs 0 <= start <= stop <= " + std::to_string(shape_[a]) +
                " and step >= 1, got " + std::to_string(start) + ":" + std::to_string(stop) + ":" +
                std::to_string(step));
  }
  Tensor view = loose();
  view.shape_[a] = stop == start ? 0 : (stop - start - 1) / step + 1;
  view.offset_ += view.shape_[a] == 0 ? 0 : start * strides_[a];
  view.strides_[a] = view.shape_[a] <= 1 ? strides_[a] : strides_[a] * step;
  view.size_ = *element_count(view.shape_);
  return view;
}

Tensor Tensor::select(std::int64_t axis, std::int64_t index) const {
  const std::int64_t a = axis_or_throw(axis, shape_);
  if (index < 0 || index >= shape_[a]) {
    throw wrong("select needs an index in [0, " + std::to_string(shape_[a]) + "), got " +
                std::to_string(index));
  }
  const Tensor one = slice(a, index, index + 1);
  Tensor view = one;
  view.shape_ = Shape();
  view.strides_ = Strides();
  for (std::int64_t i = 0; i < rank(); ++i) {
    if (i == a) continue;
    view.shape_.push_back(one.shape_[i]);
    view.strides_.push_back(one.strides_[i]);
  }
  return view;
}

Tensor Tensor::broadcast_to(Shape shape) const {
  const auto joined = broadcast_shapes(shape_, shape);
  if (!joined || !(*joined == shape)) {
    throw wrong(to_string(shape_) + " must broadcast to the shape asked for, got " +
                to_string(shape));
  }
  Tensor view = loose();
  view.size_ = count_or_throw(shape);
  view.shape_ = shape;
  view.strides_ = shape;
  const std::int64_t added = shape.rank() - rank();
  for (std::int64_t i = 0; i < shape.rank(); ++i) {
    const bool stretched = i < added || (shape_[i - added] == 1 && shape[i] != 1);
    view.strides_[i] = stretched ? 0 : strides_[i - added];
  }
  return view;
}

void Tensor::check_host(DType asked) const {
  if (asked != dtype_) {
    throw Error(Errc::kDType, std::string("tensor: host access must name the tensor's type ") +
                                  name_of(dtype_) + ", got " + name_of(asked));
  }
  if (!is_contiguous()) {
    throw wrong("host access needs a contiguous tensor, got " + to_string(shape_) +
                " with strides " + to_string(strides_));
  }
  if (size_ == 0) return;
  if (!has_memory()) throw wrong("host access needs memory, got a tensor without any");
  if (!buffer_.device()->limits().host_visible) {
    throw Error(Errc::kDevice,
                "tensor: host access needs memory the host can see, got a tensor on " +
                    buffer_.device()->name() + "; download it");
  }
}

}  // namespace mlxtape
