#include "mlxtape/models/load.h"

#include <algorithm>
#include <map>
#include <optional>

#include "mlxtape/base/quote.h"
#include "mlxtape/core/bump_allocator.h"
#include "mlxtape/formats/model_directory.h"
#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/layout.h"
#include "rope.h"

namespace mlxtape::models {

namespace {

// A tensor of a directory, before anything of its data is read.
struct Stored {
  std::string name;  // in its file
  Tensor like;       // its type and shape, without memory
};

// How the names of all that a part's layer has begin.
std::string layer_of(const Part& part) {
  return part.name.substr(0, part.name.size() - part.path.size());
}

// "experts.{e}.up_proj.weight" with a number in the place of {e}.
std::string numbered(const std::string& pattern, std::int64_t e) {
  const std::size_t at = pattern.find("{e}");
  if (at == std::string::npos) return pattern;
  return pattern.substr(0, at) + std::to_string(e) + pattern.substr(at + 3);
}

// The tensors of a directory under the names that MLX gives them.
class Source {
 public:
  Source(const formats::ModelFiles& files, const Config& config) : files_(files), c_(config) {
    for (const std::string& name : files.names()) {
      const std::optional<std::string> known = renamed(name);
      if (!known) continue;
      const auto [at, is_new] = names_.emplace(*known, name);
      if (!is_new) {
        throw Error(Errc::kIo, files.info(name).file + ": " + shown(name) + " and " +
                                   shown(at->second) + " are the same weight; delete one of them");
      }
    }
  }

  bool has(const std::string& name) const { return names_.count(name) != 0; }
  // Does it have what Hugging Face's files have and MLX's form never: a filter [C, 1, K], or one tensor for each expert?
  bool is_foreign(const Part& part) const {
    if (part.role == Role::kConv) {
      const auto found = names_.find(part.name);
      if (found == names_.end()) return false;
      const Shape& shape = files_.info(found->second).shape;
      return shape.rank() == 3 && shape[2] != 1;
    }
    const ForeignExperts* theirs = foreign_experts(part);
    return theirs != nullptr && has(layer_of(part) + numbered(theirs->each, 0));
  }
  // The rule for a weight of experts; null where there is none.
  const ForeignExperts* foreign_experts(const Part& part) const {
    const auto& rules = c_.foreign.experts;
    const auto found = std::find_if(rules.begin(), rules.end(), [&](const ForeignExperts& rule) {
      return part.experts > 0 && rule.path == part.path;
    });
    return found == rules.end() ? nullptr : &*found;
  }

  const formats::ModelFiles& files() const { return files_; }

  // Each may be taken once.
  Stored take(const std::string& name) {
    const auto found = names_.find(name);
    if (found == names_.end()) {
      throw Error(Errc::kIo, files_.path() + ": the tensor " + name + " is missing");
    }
    const formats::TensorInfo& info = files_.info(found->second);
    if (!info.dtype) files_.tensor(found->second);  // says so
    Stored stored{found->second, Tensor::meta(info.shape, *info.dtype)};
    names_.erase(found);
    return stored;
  }

  void expect_empty() const {
    if (names_.empty()) return;
    const std::string& name = names_.begin()->second;
    throw Error(
        Errc::kIo,
        files_.info(name).file + ": the tensor " + shown(name) + " does not belong to a " +
            c_.model_type + " with this config.json" +
            (names_.size() > 1 ? ", nor do " + std::to_string(names_.size() - 1) + " others" : ""));
  }

 private:
  std::optional<std::string> renamed(const std::string& name) const {
    const ForeignNames& foreign = c_.foreign;
    const auto begins = [](const std::string& whole) {
      return [&whole](const std::string& part) {
        return whole.starts_with(part);
      };
    };
    const auto is_within = [&](const std::string& part) {
      return name.find(part) != std::string::npos;
    };
    if (std::ranges::any_of(foreign.left_out, begins(name)) ||
        std::ranges::any_of(foreign.left_out_within, is_within)) {
      return std::nullopt;
    }
    std::string known = name.starts_with(c_.prefix) ? name : c_.prefix + name;
    for (const auto& [theirs, ours] : foreign.replaced) {
      if (name.starts_with(theirs)) known = ours + name.substr(theirs.size());
    }
    if (c_.plan.tied &&
        std::ranges::any_of(foreign.left_out_if_tied, begins(known.substr(c_.prefix.size())))) {
      return std::nullopt;
    }
    return known;
  }

  const formats::ModelFiles& files_;
  const Config& c_;
  std::map<std::string, std::string> names_;  // MLX's -> the file's
};

// Where the weights come to be.
struct Place {
  CommandEncoder& encoder;
  BumpAllocator memory;
};

// Without a place tensors have no memory, and all else is checked the same.
class Loader {
 public:
  Loader(Source& source, const Config& config, std::string path, Place* place,
         const LoadOptions& options)
      : source_(source),
        c_(config),
        path_(std::move(path)),
        place_(place),
        options_(options),
        all_(source.files().total_bytes()) {}

  void fill(const std::vector<Slot>& slots) {
    norms_from_0_ = c_.foreign.norms_from_0 && std::ranges::any_of(slots, [&](const Slot& slot) {
                      return source_.is_foreign(slot);
                    });
    for (const Slot& slot : slots) fill(slot);
  }

 private:
  void fill(const Slot& slot) {
    if (slot.is_weight) {
      *slot.weight = weight(slot);
    } else {
      *slot.tensor = tensor(slot);
    }
  }

  [[noreturn]] void fail(const std::string& name, const std::string& what) const {
    throw Error(Errc::kIo, path_ + ": the tensor " + name + " " + what);
  }

  void expect(const std::string& name, const Tensor& t, const Shape& shape) const {
    if (!(t.shape() == shape)) {
      fail(name, "must be " + to_string(shape) + " according to config.json, got " +
                     to_string(t.shape()));
    }
    if (!is_kernel_float(t.dtype())) {
      fail(name, std::string("must be f32, f16 or bf16, got ") + name_of(t.dtype()));
    }
  }

  void count(std::size_t bytes) {
    done_ += bytes;
    if (options_.progress) options_.progress(done_, all_);
  }

  Tensor empty(const Shape& shape, DType dtype) {
    return place_ == nullptr ? Tensor::meta(shape, dtype) : place_->memory.empty(shape, dtype);
  }

  // Bytes [begin, begin + to.bytes()) of a stored tensor, straight from where its file is mapped.
  void copy(const Stored& stored, std::size_t begin, const Tensor& to) {
    if (place_ == nullptr) return;
    const formats::ModelFiles::Bytes from = source_.files().bytes(stored.name);
    place_->encoder.upload(from.bytes.data() + begin, to.bytes(), to);
    count(to.bytes());
  }

  // Where the device uses the host's memory, the file's own.
  Tensor placed(const Stored& stored) {
    if (place_ == nullptr) return stored.like;
    if (place_->encoder.device().traits().uses_host_memory) {
      count(stored.like.bytes());
      return source_.files().tensor(stored.name);
    }
    const Tensor host = source_.files().tensor(stored.name);
    if (const Buffer same = place_->encoder.device().adopt(host.buffer())) {
      place_->memory.forget(host.bytes());
      count(host.bytes());
      return {same, host.dtype(), host.shape()};
    }
    const Tensor t = empty(stored.like.shape(), stored.like.dtype());
    copy(stored, 0, t);
    return t;
  }

  Tensor tensor(const Slot& slot) {
    Stored stored = source_.take(slot.name);
    // [C, K, 1], or [C, 1, K]: the same bytes.
    if (slot.role == Role::kConv && stored.like.shape() == Shape{slot.shape[0], 1, slot.shape[1]}) {
      stored.like = stored.like.reshape(slot.file_shape);
    }
    expect(slot.name, stored.like, slot.file_shape);
    const Tensor t = placed(stored).reshape(slot.shape);
    // Hugging Face's norms multiply by 1 + w; that of a delta net's result by w.
    const bool from_0 = norms_from_0_ && slot.role == Role::kNorm;
    if (place_ == nullptr || !from_0) return t;
    return ops::add(place_->encoder, t, place_->encoder.full({}, t.dtype(), 1));
  }

  nn::Weight weight(const Slot& slot) {
    const auto listed = c_.quantization.of.find(slot.name);
    const bool is_listed = listed != c_.quantization.of.end();
    const bool scaled = source_.has(slot.name + ".scales");
    const WeightFormat format = c_.quantization.of_module(slot.name);
    if (format.bits > 0 && (scaled || is_listed)) return quantized(slot, format);
    if (scaled)
      fail(slot.name + ".scales", "is present, but config.json does not say how it is quantised");
    const ForeignExperts* theirs = source_.foreign_experts(slot);
    if (theirs != nullptr && !source_.has(slot.name + ".weight")) return stacked(slot, *theirs);
    const Stored stored = source_.take(slot.name + ".weight");
    expect(slot.name + ".weight", stored.like, slot.shape);
    return placed(stored);
  }

  nn::Weight quantized(const Slot& slot, const WeightFormat& format) {
    const std::int64_t in = slot.shape.back();
    Shape shape = slot.shape, groups = slot.shape;
    shape[shape.rank() - 1] = in * format.bits / 32;
    groups[groups.rank() - 1] = in / format.group_size;
    const Stored codes = source_.take(slot.name + ".weight");
    const Stored scales = source_.take(slot.name + ".scales");
    const Stored biases = source_.take(slot.name + ".biases");
    if (in % format.group_size != 0) {
      fail(slot.name + ".weight", "has rows of " + std::to_string(in) +
                                      " values, no multiple of the group size " +
                                      std::to_string(format.group_size));
    }
    if (!(codes.like.shape() == shape) || codes.like.dtype() != DType::kU32) {
      fail(slot.name + ".weight",
           "must be " + to_string(shape) + " u32 for " + std::to_string(format.bits) +
               " bits in groups of " + std::to_string(format.group_size) + ", got " +
               to_string(codes.like.shape()) + " " + name_of(codes.like.dtype()));
    }
    expect(slot.name + ".scales", scales.like, groups);
    expect(slot.name + ".biases", biases.like, groups);
    if (biases.like.dtype() != scales.like.dtype()) {
      fail(slot.name + ".biases", std::string("must have the scales' type ") +
                                      name_of(scales.like.dtype()) + ", got " +
                                      name_of(biases.like.dtype()));
    }
    ops::QuantizedWeight w;
    w.format = {format.bits, format.group_size};
    w.codes = placed(codes);
    w.scales = placed(scales);
    w.biases = placed(biases);
    return w;
  }

  nn::Weight stacked(const Slot& slot, const ForeignExperts& theirs) {
    const std::string layer = layer_of(slot), all_in_one = layer + theirs.together;
    if (source_.has(all_in_one) || halves_.count(all_in_one) != 0) {
      if (theirs.rows != ForeignExperts::Rows::kAll) return half_of(slot, all_in_one, theirs.rows);
      const Stored stored = source_.take(all_in_one);
      expect(all_in_one, stored.like, slot.shape);
      return placed(stored);
    }
    Tensor all;
    for (std::int64_t e = 0; e < slot.shape[0]; ++e) {
      const std::string name = layer + numbered(theirs.each, e);
      if (e == 0 && !source_.has(name))
        source_.take(slot.name + ".weight");  // names what is missing
      const Stored stored = source_.take(name);
      expect(name, stored.like, {slot.shape[1], slot.shape[2]});
      if (e == 0) all = empty(slot.shape, stored.like.dtype());
      if (stored.like.dtype() != all.dtype()) {
        fail(name, "has a different type from the experts before it");
      }
      if (place_ != nullptr) copy(stored, 0, all.select(0, e));
    }
    return all;
  }

  // Of each expert's [2·out, in] the first or the second half of the rows.
  Tensor half_of(const Slot& slot, const std::string& name, ForeignExperts::Rows rows) {
    auto [at, is_new] = halves_.try_emplace(name);
    if (is_new) at->second = source_.take(name);
    const Stored& both = at->second;
    expect(name, both.like, {slot.shape[0], 2 * slot.shape[1], slot.shape[2]});
    const Tensor half = empty(slot.shape, both.like.dtype());
    if (place_ == nullptr) return half;
    const bool second = rows == ForeignExperts::Rows::kSecondHalf;
    for (std::int64_t e = 0; e < slot.shape[0]; ++e) {
      const Tensor to = half.select(0, e);
      const std::size_t which = 2 * static_cast<std::size_t>(e) + (second ? 1 : 0);
      copy(both, which * to.bytes(), to);
    }
    return half;
  }

  Source& source_;
  const Config& c_;
  std::string path_;
  Place* place_;
  const LoadOptions& options_;
  std::size_t all_, done_ = 0;
  bool norms_from_0_ = false;
  std::map<std::string, Stored> halves_;  // of which the other half may be asked for as well
};

// All of the embedding's type; norms, filters, A_log and dt_bias may be f32.
void expect_one_type(const Model& model, const std::vector<Slot>& slots, const std::string& path) {
  for (const Slot& slot : slots) {
    const DType type = slot.is_weight ? slot.weight->dtype() : slot.tensor->dtype();
    const bool may_be_wide = !slot.is_weight && slot.role != Role::kBias;
    if (type == model.dtype() || (may_be_wide && type == DType::kF32)) continue;
    throw Error(Errc::kIo, path + ": the tensor " + slot.name + " is " + name_of(type) +
                               ", the embedding " + name_of(model.dtype()) +
                               ": all weights must have the same type");
  }
}

void fill(Model& model, const formats::ModelFiles& files, Place* place,
          const LoadOptions& options) {
  Source source(files, model.config);
  Loader loader(source, model.config, files.path(), place, options);
  const std::vector<Slot> all = slots(model.weights, model.config);
  loader.fill(all);
  source.expect_empty();
  expect_one_type(model, all, files.path());
}

Model configured(const std::string& directory, const Architecture* architecture) {
  Model model;
  model.config = Config::parse(formats::read_model_config(directory),
                               formats::model_config_path(directory), architecture);
  return model;
}

}  // namespace

Model load_model(const std::string& directory, CommandEncoder& encoder,
                 const LoadOptions& options) {
  Model model = configured(directory, options.architecture);
  const formats::ModelFiles files(directory);
  fill(model, files, nullptr, {});  // what is wrong is found before any memory is taken
  Place place{encoder, BumpAllocator(encoder.device())};
  if (!encoder.device().traits().uses_host_memory) {
    for (const Parameter& p : parameters(model)) place.memory.expect(p.tensor.bytes());
  }
  fill(model, files, &place, options);
  model.ropes = make_ropes(model.config.plan, encoder, model.dtype());
  encoder.commit_and_wait();
  return model;
}

Model load_shapes(const std::string& directory) {
  Model model = configured(directory, nullptr);
  fill(model, formats::ModelFiles(directory), nullptr, {});
  return model;
}

}  // namespace mlxtape::models
