#include "mlxtape/formats/gguf_model.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "formats/gguf_pieces.h"
#include "mlxtape/base/error.h"
#include "mlxtape/base/quote.h"
#include "mlxtape/core/device.h"
#include "mlxtape/core/threads.h"

namespace mlxtape::formats {

namespace {

constexpr int kGroup = 32;  // what kernels take

// What of a piece a tensor is.
enum class Part : std::uint8_t { kNumbers, kCodes, kScales, kBiases };

// The affine form that a piece stays quantised in.
std::optional<GgufAffine> format_of(const GgufFile& file, const GgufPiece& piece) {
  if (!piece.of->weight) return std::nullopt;
  const GgufType type = file.tensor(piece.sources[0]).type;
  for (const std::string& source : piece.sources) {
    if (file.tensor(source).type != type) return std::nullopt;
  }
  const std::optional<GgufAffine> affine = info_of(type).affine;
  if (!affine || affine->group != kGroup || piece.order.run % kGroup != 0) return std::nullopt;
  return affine;
}

// Which 16-bit types hold all numbers of a type.
struct Held {
  bool f16 = true, bf16 = true;
};
Held held_by(GgufType type, const std::optional<GgufAffine>& format) {
  if (format) return {format->scales == DType::kF16, false};
  switch (type) {
    case GgufType::kF16: return {true, false};
    case GgufType::kBf16:
    case GgufType::kMxfp4: return {false, true};
    case GgufType::kNvfp4: return {true, true};
    default: return {false, false};
  }
}

DType type_of_model(const GgufFile& file, const std::vector<GgufPiece>& pieces) {
  Held all;
  for (const GgufPiece& piece : pieces) {
    if (!piece.of->weight) continue;
    for (const std::string& source : piece.sources) {
      const Held one = held_by(file.tensor(source).type, format_of(file, piece));
      all = {all.f16 && one.f16, all.bf16 && one.bf16};
    }
  }
  return all.f16 ? DType::kF16 : all.bf16 ? DType::kBF16 : DType::kF32;
}

Json block_of(const GgufAffine& format) {
  return Json::Object{{"group_size", format.group}, {"bits", format.bits}};
}

// "quantization" of config.json: the quantisation that most modules have, and the others by name.
Json quantization_of(const std::map<std::string, GgufAffine>& quantized) {
  std::map<int, std::size_t> modules;  // by bits
  for (const auto& [name, format] : quantized) ++modules[format.bits];
  const auto usual =
      std::max_element(modules.begin(), modules.end(), [](const auto& a, const auto& b) {
        return a.second < b.second;
      })->first;
  Json result = block_of({usual, kGroup, DType::kF16});
  result.set("mode", "affine");
  for (const auto& [name, format] : quantized) {
    if (format.bits != usual) result.set(name, block_of(format));
  }
  return result;
}

Shape with_last(Shape shape, std::int64_t last) {
  shape[shape.rank() - 1] = last;
  return shape;
}

}  // namespace

struct GgufModel::Entry {
  std::shared_ptr<const GgufPiece> piece;
  Part part = Part::kNumbers;
  TensorInfo info;
};

namespace {

// Rows of a piece, in MLX's order, converted one by one.
class Rows {
 public:
  Rows(const GgufFile& file, const GgufPiece& piece) : order_(piece.order) {
    for (const std::string& source : piece.sources) {
      const GgufTensor& tensor = file.tensor(source);
      const std::int64_t all = *element_count(tensor.shape);
      // A vector whose elements are moved is rows of one number each.
      const bool is_vector = piece.shape.rank() == 1;
      numbers_ = !is_vector ? tensor.shape.back() : order_.rows.empty() ? all : 1;
      const std::int64_t rows = all / numbers_;
      parts_.push_back({file.bytes(tensor), tensor.type, count_, rows});
      count_ += rows;
    }
    if (!order_.rows.empty()) count_ = static_cast<std::int64_t>(order_.rows.size());
  }

  std::int64_t count() const { return count_; }
  std::int64_t numbers() const { return numbers_; }
  const GgufOrder& order() const { return order_; }

  struct Row {
    GgufType type;
    std::span<const std::byte> blocks;
  };
  Row row(std::int64_t i) const {
    const std::int64_t at = order_.rows.empty() ? i : order_.rows[static_cast<std::size_t>(i)];
    const Source& source = parts_.size() > 1 && at >= parts_[1].first ? parts_[1] : parts_[0];
    const std::size_t bytes = source.bytes.size() / static_cast<std::size_t>(source.rows);
    return {source.type,
            source.bytes.subspan(static_cast<std::size_t>(at - source.first) * bytes, bytes)};
  }

 private:
  struct Source {
    std::span<const std::byte> bytes;
    GgufType type;
    std::int64_t first, rows;
  };
  const GgufOrder& order_;
  std::vector<Source> parts_;
  std::int64_t count_ = 0, numbers_ = 0;
};

// Runs of `run` elements of a row into MLX's order.
template <class T>
void move_columns(const GgufOrder& order, std::size_t run, std::span<T> row, std::vector<T>& copy) {
  if (order.columns.empty()) return;
  copy.assign(row.begin(), row.end());
  for (std::size_t i = 0; i < order.columns.size(); ++i) {
    const auto from = static_cast<std::size_t>(order.columns[i]) * run;
    std::copy_n(copy.begin() + static_cast<std::ptrdiff_t>(from), run,
                row.begin() + static_cast<std::ptrdiff_t>(i * run));
  }
}

// A_log from −exp(A_log).
void undo_decay(std::span<float> numbers) {
  for (float& a : numbers) a = static_cast<float>(std::log(-static_cast<double>(a)));
}

// Calls row(i, scratch) for each row, on all threads.
template <class T, class Fn>
void each_row(std::int64_t rows, const Fn& fn) {
  constexpr std::int64_t kRows = 64;  // of a task
  parallel_for((rows + kRows - 1) / kRows, [&](std::int64_t task) {
    std::vector<T> a, b;
    const std::int64_t end = std::min(rows, (task + 1) * kRows);
    for (std::int64_t i = task * kRows; i < end; ++i) fn(i, a, b);
  });
}

void fill_numbers(const Rows& rows, bool is_decay, Tensor& to) {
  const auto n = static_cast<std::size_t>(rows.numbers());
  const std::size_t bytes = n * size_of(to.dtype());
  auto* out = static_cast<std::byte*>(to.data());
  each_row<float>(rows.count(), [&](std::int64_t i, std::vector<float>& a, std::vector<float>& b) {
    a.resize(n);
    const Rows::Row row = rows.row(i);
    dequantize(row.type, row.blocks, a);
    move_columns<float>(rows.order(), static_cast<std::size_t>(rows.order().run), a, b);
    if (is_decay) undo_decay(a);
    convert(a.data(), DType::kF32, out + static_cast<std::size_t>(i) * bytes, to.dtype(), n);
  });
}

void fill_codes(const Rows& rows, int bits, Tensor& to) {
  const auto words = static_cast<std::size_t>(rows.numbers() * bits / 32);
  const auto run = static_cast<std::size_t>(rows.order().run * bits / 32);
  auto* out = to.host<std::uint32_t>().data();
  using Words = std::vector<std::uint32_t>;
  each_row<std::uint32_t>(rows.count(), [&](std::int64_t i, Words&, Words& b) {
    const std::span<std::uint32_t> at(out + static_cast<std::size_t>(i) * words, words);
    const Rows::Row row = rows.row(i);
    affine_codes(row.type, row.blocks, at);
    move_columns<std::uint32_t>(rows.order(), run, at, b);
  });
}

// Returns false where one is finite, but not in the tensor's type.
bool fill_scales(const Rows& rows, bool biases, Tensor& to) {
  const auto groups = static_cast<std::size_t>(rows.numbers() / kGroup);
  const auto run = static_cast<std::size_t>(rows.order().run / kGroup);
  const std::size_t bytes = groups * size_of(to.dtype());
  auto* out = static_cast<std::byte*>(to.data());
  std::atomic<bool> fits = true;
  each_row<float>(rows.count(), [&](std::int64_t i, std::vector<float>& a, std::vector<float>& b) {
    a.resize(groups);
    const Rows::Row row = rows.row(i);
    std::span<float> scales = a, none;
    affine_scales(row.type, row.blocks, biases ? none : scales, biases ? scales : none);
    move_columns<float>(rows.order(), run, a, b);
    if (to.dtype() == DType::kF16) {
      const auto is_large = [](float x) {
        return std::isfinite(x) && std::isinf(static_cast<float>(F16(x)));
      };
      if (std::any_of(a.begin(), a.end(), is_large)) fits = false;
    }
    convert(a.data(), DType::kF32, out + static_cast<std::size_t>(i) * bytes, to.dtype(), groups);
  });
  return fits;
}

// The file's own bytes, where they are what MLX has.
bool lies_as_it_is(const GgufFile& file, const GgufPiece& piece, DType dtype) {
  if (piece.sources.size() != 1 || !piece.order.rows.empty() || !piece.order.columns.empty()) {
    return false;
  }
  const GgufTensor& tensor = file.tensor(piece.sources[0]);
  const bool is_decay =
      piece.of->move == GgufMove::kDecay || piece.of->move == GgufMove::kDecayHeads;
  return !is_decay && info_of(tensor.type).dtype == dtype && tensor.begin % size_of(dtype) == 0;
}

}  // namespace

GgufModel::GgufModel(const std::string& path) : file_(path) {
  const GgufArchitecture& architecture = architecture_of(file_);
  config_ = config_of_gguf(file_, architecture);
  const GgufSizes sizes = gguf_sizes(config_, architecture, "gguf: " + path);
  std::vector<GgufPiece> pieces = pieces_of(file_, architecture, sizes);
  const DType dtype = type_of_model(file_, pieces);
  std::map<std::string, GgufAffine> quantized;
  for (GgufPiece& moved : pieces) {
    const auto piece = std::make_shared<const GgufPiece>(std::move(moved));
    const GgufTensor& tensor = file_.tensor(piece->sources[0]);
    const GgufTypeInfo& type = info_of(tensor.type);
    const auto entry = [&](Part part, DType of, const Shape& shape) {
      const std::size_t bytes = static_cast<std::size_t>(*element_count(shape)) * size_of(of);
      return Entry{piece, part, {type.name, of, shape, bytes, file_.files()[tensor.part]}};
    };
    if (const auto format = format_of(file_, *piece)) {
      const std::int64_t numbers = piece->shape.back();
      const Shape groups = with_last(piece->shape, numbers / kGroup);
      quantized.emplace(piece->name, *format);
      add(piece->name + ".weight",
          entry(Part::kCodes, DType::kU32, with_last(piece->shape, numbers * format->bits / 32)));
      add(piece->name + ".scales", entry(Part::kScales, dtype, groups));
      add(piece->name + ".biases", entry(Part::kBiases, dtype, groups));
      continue;
    }
    const bool is_bias = !piece->of->weight && piece->name.ends_with(".bias");
    const bool narrow = piece->of->weight || is_bias;
    add(piece->of->weight ? piece->name + ".weight" : piece->name,
        entry(Part::kNumbers, narrow ? dtype : type.dtype.value_or(DType::kF32), piece->shape));
  }
  if (!quantized.empty()) {
    const Json block = quantization_of(quantized);
    config_.set("quantization", block);
    config_.set("quantization_config", block);
  }
  for (const auto& [name, one] : entries_) names_.push_back(name);
}

GgufModel::~GgufModel() = default;

void GgufModel::add(std::string name, Entry entry) {
  total_bytes_ += entry.info.bytes;
  entries_.emplace(std::move(name), std::make_unique<Entry>(std::move(entry)));
}

bool GgufModel::has(std::string_view name) const { return entries_.find(name) != entries_.end(); }

const GgufModel::Entry& GgufModel::entry(std::string_view name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) file_.fail("tensor \"" + shown(name) + "\" must be in the file");
  return *found->second;
}

const TensorInfo& GgufModel::info(std::string_view name) const { return entry(name).info; }

Tensor GgufModel::tensor(std::string_view name) const {
  const Entry& of = entry(name);
  const GgufPiece& piece = *of.piece;
  if (of.part == Part::kNumbers && lies_as_it_is(file_, piece, *of.info.dtype)) {
    return file_.in_place(file_.tensor(piece.sources[0]), *of.info.dtype, of.info.shape);
  }
  Tensor to = Device::cpu().empty(of.info.shape, *of.info.dtype);
  const Rows rows(file_, piece);
  const bool is_decay =
      piece.of->move == GgufMove::kDecay || piece.of->move == GgufMove::kDecayHeads;
  switch (of.part) {
    case Part::kNumbers: fill_numbers(rows, is_decay, to); break;
    case Part::kCodes: fill_codes(rows, format_of(file_, piece)->bits, to); break;
    case Part::kScales:
    case Part::kBiases:
      if (!fill_scales(rows, of.part == Part::kBiases, to)) {
        file_.fail("tensor \"" + shown(piece.sources[0]) +
                   "\" has scales too large for f16, which no real model has");
      }
  }
  return to;
}

}  // namespace mlxtape::formats
