#include "mlxtape/formats/gguf_export.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "formats/gguf_pieces.h"
#include "mlxtape/base/error.h"
#include "mlxtape/base/quote.h"
#include "mlxtape/core/device.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/core/threads.h"

namespace mlxtape::formats {

namespace {

constexpr const char* kSource = "gguf";
constexpr std::int64_t kBlock = 32;
constexpr std::int64_t kRowsAtOnce = 1024;

[[noreturn]] void fail(const std::string& what) {
  throw Error(Errc::kArgument, std::string(kSource) + ": " + what);
}

// A contiguous tensor in the host's memory.
Tensor on_host(const Tensor& t) {
  const auto encoder = t.device()->make_encoder();
  const Tensor flat = encoder->contiguous(t);
  if (t.device()->limits().host_visible) {
    encoder->commit_and_wait();
    return flat;
  }
  Tensor copy = Device::cpu().empty(t.shape(), t.dtype());
  encoder->download(flat, copy.data(), flat.bytes());
  return copy;
}

std::vector<float> floats_of(const Tensor& t, std::int64_t first, std::int64_t count) {
  std::vector<float> result(static_cast<std::size_t>(count));
  const auto* data = static_cast<const std::byte*>(t.data());
  convert(data + static_cast<std::size_t>(first) * size_of(t.dtype()), t.dtype(), result.data(),
          DType::kF32, result.size());
  return result;
}

// ---- a weight or a tensor in MLX's form, row by row ----

struct Module {
  Tensor plain;                  // or
  Tensor codes, scales, biases;  // of groups
  int bits = 0, group = 0;

  bool is_quantized() const { return bits > 0; }
  Shape shape() const {
    Shape shape = is_quantized() ? codes.shape() : plain.shape();
    if (is_quantized()) shape[shape.rank() - 1] = shape.back() * 32 / bits;
    return shape;
  }
};

std::vector<float> groups_of(const Tensor& t, std::int64_t row) {
  const std::int64_t groups = t.shape().back();
  return floats_of(t, row * groups, groups);
}

std::span<const std::uint32_t> words_of(const Tensor& codes, std::int64_t row) {
  const auto words = static_cast<std::size_t>(codes.shape().back());
  return {static_cast<const std::uint32_t*>(codes.data()) + static_cast<std::size_t>(row) * words,
          words};
}

std::vector<float> row_numbers(const Module& m, std::int64_t row, std::int64_t numbers) {
  if (!m.is_quantized()) return floats_of(m.plain, row * numbers, numbers);
  const std::span<const std::uint32_t> words = words_of(m.codes, row);
  const std::vector<float> s = groups_of(m.scales, row), b = groups_of(m.biases, row);
  std::vector<float> result(static_cast<std::size_t>(numbers));
  const auto bits = static_cast<std::size_t>(m.bits), group = static_cast<std::size_t>(m.group);
  for (std::size_t i = 0; i < result.size(); ++i) {
    std::uint64_t pair = words[i * bits / 32];
    if (i * bits / 32 + 1 < words.size()) {
      pair |= static_cast<std::uint64_t>(words[i * bits / 32 + 1]) << 32U;
    }
    const auto q = static_cast<float>(pair >> i * bits % 32 & ((1U << bits) - 1U));
    const float product = s[i / group] * q;
    result[i] = product + b[i / group];
  }
  return result;
}

// Runs of `run` elements where the file has them.
template <class T>
void place_columns(const GgufOrder& order, std::size_t run, std::vector<T>& row) {
  if (order.columns.empty()) return;
  const std::vector<T> from = row;
  for (std::size_t i = 0; i < order.columns.size(); ++i) {
    const auto to = static_cast<std::size_t>(order.columns[i]) * run;
    std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(i * run), run,
                row.begin() + static_cast<std::ptrdiff_t>(to));
  }
}

// ---- what is written ----

// How a module is written: one or two tensors of one type.
struct Plan {
  const GgufName* name = nullptr;
  std::string of;  // the module
  Shape shape;     // in MLX
  GgufOrder order;
  GgufType type = GgufType::kF32;
  bool exact = false;  // blocks of the module's own codes
  std::int64_t rows = 0, numbers = 0;
};

std::vector<std::byte> row_blocks(const Plan& plan, const Module& m, std::int64_t row) {
  const GgufTypeInfo& info = info_of(plan.type);
  std::vector<std::byte> blocks(static_cast<std::size_t>(plan.numbers / info.block * info.bytes));
  if (plan.exact) {
    blocks_of_affine(plan.type, m.group, words_of(m.codes, row), groups_of(m.scales, row),
                     groups_of(m.biases, row), blocks);
    place_columns(plan.order, static_cast<std::size_t>(plan.order.run / kBlock * info.bytes),
                  blocks);
    return blocks;
  }
  std::vector<float> numbers = row_numbers(m, row, plan.numbers);
  place_columns(plan.order, static_cast<std::size_t>(plan.order.run), numbers);
  const GgufMove move = plan.name->move;
  if (move == GgufMove::kDecay || move == GgufMove::kDecayHeads) {
    for (float& a : numbers) a = static_cast<float>(-std::exp(static_cast<double>(a)));
  }
  quantize(plan.type, numbers, blocks);
  return blocks;
}

// Rows [first, first + count) of the file's, in its order.
void write_rows(const Plan& plan, const Module& m, std::int64_t first, std::int64_t count,
                const std::function<void(std::span<const std::byte>)>& put) {
  std::vector<std::int64_t> from(plan.order.rows.size());
  for (std::size_t i = 0; i < from.size(); ++i) {
    from[static_cast<std::size_t>(plan.order.rows[i])] = static_cast<std::int64_t>(i);
  }
  const GgufTypeInfo& info = info_of(plan.type);
  const auto bytes = static_cast<std::size_t>(plan.numbers / info.block * info.bytes);
  std::vector<std::byte> piece;
  for (std::int64_t begin = first; begin < first + count; begin += kRowsAtOnce) {
    const std::int64_t rows = std::min(kRowsAtOnce, first + count - begin);
    piece.resize(static_cast<std::size_t>(rows) * bytes);
    parallel_for(rows, [&](std::int64_t i) {
      const std::int64_t row = begin + i;
      const std::int64_t ours = from.empty() ? row : from[static_cast<std::size_t>(row)];
      const std::vector<std::byte> blocks = row_blocks(plan, m, ours);
      std::memcpy(piece.data() + static_cast<std::size_t>(i) * bytes, blocks.data(), bytes);
    });
    put(piece);
  }
}

class Exporter {
 public:
  explicit Exporter(const GgufExport& model)
      : model_(model),
        architecture_(architecture_of(model.config, kSource)),
        sizes_(gguf_sizes(model.config, architecture_, std::string(kSource) + ": config.json")) {
    for (const NamedTensor& item : model.tensors) {
      std::string name = item.name;
      // Architectures of one model read both.
      if (!name.starts_with(architecture_.prefix)) name = architecture_.prefix + name;
      if (!left_.emplace(name, &item.tensor).second)
        fail("tensor " + shown(name) + " must come once");
    }
  }

  GgufExported write(const std::string& path) {
    const std::span<const GgufName> outer = gguf_outer_names();
    add(outer[0], -1);
    for (std::int64_t l = 0; l < sizes_.layers; ++l) {
      each_name(architecture_, [&](const GgufName& name) { add(name, l); });
    }
    add(outer[1], -1);
    add(outer[2], -1);
    add_factors();
    if (!left_.empty()) {
      fail("tensor " + shown(left_.begin()->first) +
           " has no name in a GGUF file of architecture " + architecture_.name);
    }
    GgufExported result = counts_;
    result.paths = write_gguf(path, keys(), tensors_, {32, model_.part_bytes});
    return result;
  }

 private:
  const Tensor* take(const std::string& name) {
    const auto found = left_.find(name);
    if (found == left_.end()) return nullptr;
    const Tensor* tensor = found->second;
    left_.erase(found);
    return tensor;
  }

  // Tensors stay where they are; they come to the host one by one when they are written.
  struct Source {
    const Tensor *plain = nullptr, *scales = nullptr, *biases = nullptr;
    int bits = 0, group = 0;

    Module module() const {
      Module m;
      if (bits == 0) {
        m.plain = on_host(*plain);
        return m;
      }
      m.codes = on_host(*plain);
      m.scales = on_host(*scales);
      m.biases = on_host(*biases);
      m.bits = bits;
      m.group = group;
      return m;
    }
  };

  std::int64_t number_in(const std::string& module, const char* key) const {
    const Json* block = model_.config.find("quantization");
    const Json* own = block == nullptr ? nullptr : block->find(module);
    const Json* value = own != nullptr && own->is_object() ? own->find(key) : nullptr;
    if (value == nullptr && block != nullptr) value = block->find(key);
    if (value == nullptr || !value->is_integer()) {
      fail("config.json must say how " + shown(module) + " is quantised");
    }
    return value->integer();
  }

  void add(const GgufName& name, std::int64_t layer) {
    if (name.only_read) return;
    const std::string module = mlx_name(name, architecture_, layer);
    Source source;
    source.plain = take(name.weight ? module + ".weight" : module);
    if (source.plain == nullptr) return;
    if (name.weight) source.scales = take(module + ".scales");
    if (source.scales != nullptr) {
      source.biases = take(module + ".biases");
      source.bits = static_cast<int>(number_in(module, "bits"));
      source.group = static_cast<int>(number_in(module, "group_size"));
      if (source.biases == nullptr) fail(shown(module) + " must have biases beside its scales");
    }
    const Plan plan = plan_of(name, module, source);
    if (source.bits > 0 && !name.wide) ++(plan.exact ? counts_.exact : counts_.rounded);
    add_tensors(plan, source, layer);
  }

  Plan plan_of(const GgufName& name, const std::string& module, const Source& source) const {
    Plan plan;
    plan.name = &name;
    plan.of = module;
    plan.shape = source.plain->shape();
    if (source.bits > 0) plan.shape[plan.shape.rank() - 1] = plan.shape.back() * 32 / source.bits;
    const bool is_vector = plan.shape.rank() == 1;
    // A filter's row is all of a channel, [K, 1].
    const bool is_filter = name.move == GgufMove::kFilter || name.move == GgufMove::kFilterQkv;
    plan.numbers = is_vector ? 1 : is_filter ? plan.shape[1] : plan.shape.back();
    plan.rows = *element_count(plan.shape) / std::max<std::int64_t>(1, plan.numbers);
    plan.order =
        order_of(name, sizes_, plan.rows, plan.numbers, plan.shape.rank() == 3 ? plan.shape[0] : 1,
                 std::string(kSource) + ": " + shown(module));
    if (!name.weight || name.wide) return plan;
    if (source.bits > 0) {
      const std::optional<GgufType> type = gguf_type_of_affine(source.bits);
      plan.exact = type && plan.order.run % kBlock == 0 && fits(*type, source);
      plan.type = plan.exact ? *type : model_.otherwise;
    } else {
      plan.type = model_.matrices.value_or(own_type(module, source.plain->dtype()));
    }
    // Rows that are no whole blocks stay plain, as llama.cpp has them too.
    if (plan.numbers % info_of(plan.type).block != 0) plan.type = GgufType::kF16;
    return plan;
  }

  static GgufType own_type(const std::string& module, DType dtype) {
    switch (dtype) {
      case DType::kF32: return GgufType::kF32;
      case DType::kF16: return GgufType::kF16;
      case DType::kBF16: return GgufType::kBf16;
      default: fail(shown(module) + " must be f32, f16 or bf16, got " + name_of(dtype));
    }
  }

  static bool fits(GgufType type, const Source& source) {
    const Tensor scales = on_host(*source.scales), biases = on_host(*source.biases);
    return affine_fits(type, floats_of(scales, 0, scales.size()),
                       floats_of(biases, 0, biases.size()));
  }

  void add_tensors(const Plan& plan, const Source& source, std::int64_t layer) {
    const std::vector<std::string> names = gguf_names(*plan.name, layer);
    std::int64_t first = 0;
    for (std::size_t i = 0; i < names.size(); ++i) {
      // Of two, the second holds the rows of z.
      const std::int64_t z = sizes_.delta_value_heads * sizes_.delta_value_dim;
      const std::int64_t rows = names.size() == 1 ? plan.rows : i == 0 ? plan.rows - z : z;
      Shape shape = plan.shape;
      if (plan.name->move == GgufMove::kVector) shape = {plan.numbers};
      if (shape.rank() == 3 && shape.back() == 1) shape = {shape[0], shape[1]};
      if (names.size() == 2) shape = {rows, plan.numbers};
      GgufTensorToWrite tensor{names[i], shape, plan.type,
                               [plan, source, first, rows](const auto& put) {
                                 write_rows(plan, source.module(), first, rows, put);
                               }};
      const GgufTypeInfo& info = info_of(plan.type);
      counts_.bytes += static_cast<std::size_t>(rows * plan.numbers / info.block * info.bytes);
      if (plan.name->weight) types_[plan.type] += rows * plan.numbers;
      tensors_.push_back(std::move(tensor));
      first += rows;
    }
  }

  void add_factors() {
    const std::vector<float> factors = rope_factors_of_config(model_.config, architecture_);
    if (factors.empty()) return;
    tensors_.push_back({"rope_freqs.weight",
                        {static_cast<std::int64_t>(factors.size())},
                        GgufType::kF32,
                        [factors](const auto& put) {
                          put(std::as_bytes(std::span(factors)));
                        }});
  }

  // llama.cpp's number for a file whose matrices are mostly of this type: a label that nothing depends on.
  std::uint32_t label() const {
    GgufType most = GgufType::kF32;
    std::int64_t numbers = 0;
    for (const auto& [type, count] : types_) {
      if (count > numbers) most = type;
      numbers = std::max(numbers, count);
    }
    switch (most) {
      case GgufType::kF16: return 1;
      case GgufType::kQ40: return 2;
      case GgufType::kQ41: return 3;
      case GgufType::kQ80: return 7;
      case GgufType::kQ50: return 8;
      case GgufType::kQ51: return 9;
      case GgufType::kBf16: return 32;
      default: return 0;
    }
  }

  std::vector<GgufKey> keys() const {
    std::vector<GgufKey> keys{{"general.architecture", std::string(architecture_.name)},
                              {"general.type", std::string("model")}};
    if (!model_.name.empty()) keys.push_back({"general.name", model_.name});
    keys.push_back({"general.file_type", label()});
    keys.push_back({"general.quantization_version", std::uint32_t{2}});
    for (GgufKey& key : gguf_keys_of_config(model_.config, architecture_))
      keys.push_back(std::move(key));
    keys.insert(keys.end(), model_.more.begin(), model_.more.end());
    return keys;
  }

  const GgufExport& model_;
  const GgufArchitecture& architecture_;
  GgufSizes sizes_;
  std::map<std::string, const Tensor*> left_;
  std::vector<GgufTensorToWrite> tensors_;
  std::map<GgufType, std::int64_t> types_;  // numbers of weights
  GgufExported counts_;
};

}  // namespace

GgufExported export_gguf(const std::string& path, const GgufExport& model) {
  if (!can_quantize(model.otherwise) || (model.matrices && !can_quantize(*model.matrices))) {
    fail("weights can be written as F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0");
  }
  return Exporter(model).write(path);
}

}  // namespace mlxtape::formats
