// CPU kernels of the elementwise family (formulas: formulas.h): the walk over the operands, and the
// registration of what the other files hold. Bound by memory but for the functions on what is in cache.
#include <hwy/cache_control.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "backends/cpu/device/tasks.h"
#include "elementwise_pieces.h"
#include "mlxtape/base/checked.h"
#include "mlxtape/core/threads.h"

namespace mlxtape::ops {

namespace {

constexpr std::int64_t kLong = 16384;  // elements of a piece that is read where it lies
constexpr std::int64_t kShort = 1024;  // of one for which operands are gathered first
constexpr std::int64_t kRow = 64;      // shorter rows are gathered into longer pieces

// Calls fn with an unsigned number of that many bytes.
template <class Fn>
void of_size(std::size_t bytes, const Fn& fn) {
  switch (bytes) {
    case 1: return fn(std::uint8_t{});
    case 2: return fn(std::uint16_t{});
    case 4: return fn(std::uint32_t{});
    default: return fn(std::uint64_t{});
  }
}

// n elements, stride elements apart, side by side.
void gather(const void* from, std::int64_t stride, std::size_t bytes, void* to, std::int64_t n) {
  of_size(bytes, [&](auto zero) {
    using T = decltype(zero);
    const T* source = static_cast<const T*>(from);
    T* target = static_cast<T*>(to);
    if (stride == 0) {
      std::fill_n(target, n, *source);
    } else if (stride == 1) {
      std::memcpy(target, source, static_cast<std::size_t>(n) * sizeof(T));
    } else {
      for (std::int64_t i = 0; i < n; ++i) target[i] = source[i * stride];
    }
  });
}

struct Operand {
  const char* base;
  const std::int64_t* strides;
  std::int64_t bytes;
  alignas(8) std::array<char, 8> number;  // what base points to where it is one
};

class Walker {
 public:
  Walker(const KernelCall& call, const Walk& walk, FunctionRef<void(const Piece&)> body)
      : args_(call.as<ElementwiseArgs>()), walk_(walk), body_(body), last_(args_.rank - 1) {
    std::size_t tensor = 0;
    for (int k = 0; k < walk.operands; ++k) {
      Operand& o = operands_[static_cast<std::size_t>(k)];
      o.strides = args_.strides[k];
      o.bytes = static_cast<std::int64_t>(walk.bytes[k]);
      if ((args_.numbers >> k & 1) != 0) {
        convert(&args_.value[k], DType::kF64, o.number.data(), walk.numbers, 1);
        o.base = o.number.data();
      } else {
        o.base = call.input<char>(tensor++);
      }
      const std::int64_t inner = o.strides[last_];
      gathers_ |= (inner != 0 && inner != 1) || (walk.plain && inner != 1);
    }
  }

  void run() {
    const std::int64_t row = args_.shape[last_];
    if (args_.rank > 1 && row < kRow) {
      return in_tasks(ceil_div(args_.size, kShort), 16, [&](std::int64_t block) {
        gathered(block * kShort, std::min(kShort, args_.size - block * kShort));
      });
    }
    const std::int64_t length = gathers_ ? kShort : kLong;
    const std::int64_t pieces = ceil_div(row, length);
    const std::int64_t each = std::max<std::int64_t>(1, kLong / std::min(row, length));
    in_tasks(args_.size / row * pieces, each, [&](std::int64_t piece) {
      const std::int64_t first = piece % pieces * length;
      in_row(piece / pieces, first, std::min(length, row - first));
    });
  }

 private:
  template <class Body>
  void in_tasks(std::int64_t count, std::int64_t each, const Body& body) {
    parallel_for(ceil_div(count, each), [&](std::int64_t task) {
      const std::int64_t end = std::min(count, (task + 1) * each);
      for (std::int64_t i = task * each; i < end; ++i) body(i);
      if (walk_.streams) hwy::FlushStream();
    });
  }

  // Elements [first, first + n) of a row: operands are read where they lie if they can be.
  void in_row(std::int64_t row, std::int64_t first, std::int64_t n) {
    alignas(64) char room[4][kShort * 8];
    Piece piece{};
    piece.at = row * args_.shape[last_] + first;
    piece.n = static_cast<std::size_t>(n);
    for (int k = 0; k < walk_.operands; ++k) {
      const Operand& o = operands_[static_cast<std::size_t>(k)];
      const std::int64_t inner = o.strides[last_];
      std::int64_t at = first * inner;
      for (std::int64_t i = last_ - 1, rest = row; i >= 0; rest /= args_.shape[i], --i) {
        at += rest % args_.shape[i] * o.strides[i];
      }
      const char* from = o.base + at * o.bytes;
      const auto bytes = static_cast<std::size_t>(o.bytes);
      piece.in[k] = from;
      piece.step[k] = 1;
      if (inner == 1) continue;
      piece.in[k] = room[k];
      if (inner == 0 && !walk_.plain) {
        piece.step[k] = 0;
        gather(from, 0, bytes, room[k], kRepeats);
      } else {
        gather(from, inner, bytes, room[k], n);
      }
    }
    body_(piece);
  }

  // Elements [first, first + n) of the result, over as many short rows as that takes.
  void gathered(std::int64_t first, std::int64_t n) {
    alignas(64) char room[4][kShort * 8];
    Piece piece{};
    piece.at = first;
    piece.n = static_cast<std::size_t>(n);
    const std::int64_t row = args_.shape[last_];
    for (int k = 0; k < walk_.operands; ++k) {
      const Operand& o = operands_[static_cast<std::size_t>(k)];
      piece.in[k] = room[k];
      piece.step[k] = 1;
      // Where the row begins, carried along: a division for each short row would cost more than the row.
      std::array<std::int64_t, 8> index{};
      std::int64_t start = 0;
      for (std::int64_t i = last_ - 1, rest = first / row; i >= 0; rest /= args_.shape[i], --i) {
        index[static_cast<std::size_t>(i)] = rest % args_.shape[i];
        start += rest % args_.shape[i] * o.strides[i];
      }
      const std::int64_t inner = o.strides[last_];
      std::int64_t column = first % row;
      for (std::int64_t done = 0, count = 0; done < n; done += count, column = 0) {
        count = std::min(row - column, n - done);
        gather(o.base + (start + column * inner) * o.bytes, inner,
               static_cast<std::size_t>(o.bytes), room[k] + done * o.bytes, count);
        for (std::int64_t i = last_ - 1; i >= 0; --i) {
          start += o.strides[i];
          if (++index[static_cast<std::size_t>(i)] < args_.shape[i]) break;
          start -= args_.shape[i] * o.strides[i];
          index[static_cast<std::size_t>(i)] = 0;
        }
      }
    }
    body_(piece);
  }

  const ElementwiseArgs& args_;
  const Walk& walk_;
  FunctionRef<void(const Piece&)> body_;
  std::int64_t last_;
  std::array<Operand, 4> operands_;
  bool gathers_ = false;
};

}  // namespace

void for_pieces(const KernelCall& call, const Walk& walk, FunctionRef<void(const Piece&)> body) {
  Walker(call, walk, body).run();
}

void register_elementwise_unary_cpu(KernelRegistry& registry);
void register_elementwise_binary_cpu(KernelRegistry& registry);
void register_elementwise_whole_cpu(KernelRegistry& registry);

void register_elementwise_cpu(KernelRegistry& registry) {
  register_elementwise_unary_cpu(registry);
  register_elementwise_binary_cpu(registry);
  register_elementwise_whole_cpu(registry);
}

}  // namespace mlxtape::ops
