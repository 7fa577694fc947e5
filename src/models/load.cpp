#include "mlxtape/models/load.h"

#include <algorithm>
#include <map>
#include <optional>

#include "mlxtape/base/quote.h"
#include "mlxtape/formats/model_directory.h"
#include "mlxtape/models/lora.h"
#include "mlxtape/models/size.h"
#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/layout.h"
#include "rope.h"

namespace mlxtape::models {

namespace {

// The tensors of a directory under the names that MLX gives them.
class Source {
 public:
  Source(const formats::ModelFiles& files, const Config& config, bool numbers)
      : files_(files), c_(config), numbers_(numbers) {
    for (const std::string& name : files.names()) {
      const std::optional<std::string> known = renamed(name);
      if (!known) continue;
      const auto [at, is_new] = names_.emplace(*known, name);
      if (!is_new) {
        throw Error(Errc::kIo, files.info(name).file + ": " + shown(name) + " and " +
                                   shown(at->second) + " are the same weight of the model");
      }
      // What Hugging Face has and MLX's form never: filters [C, 1, K], one tensor for each expert.
      const bool foreign_filter = known->ends_with("conv1d.weight") &&
                                  files.info(name).shape.rank() == 3 &&
                                  files.info(name).shape[2] != 1;
      foreign_ = foreign_ || foreign_filter || known->find(".mlp.experts.0.") != std::string::npos;
    }
    foreign_ = foreign_ && config.foreign.norms_from_0;
  }

  bool has(const std::string& name) const { return names_.count(name) != 0; }
  bool is_foreign() const { return foreign_; }

  // Each may be taken once.
  Tensor take(const std::string& name) {
    const auto found = names_.find(name);
    if (found == names_.end()) {
      throw Error(Errc::kIo, files_.path() + ": the tensor " + name + " is missing");
    }
    const formats::TensorInfo& info = files_.info(found->second);
    const bool readable = info.dtype.has_value();  // if not, tensor says so
    const Tensor t = numbers_ || !readable ? files_.tensor(found->second)
                                           : Tensor::meta(info.shape, *info.dtype);
    names_.erase(found);
    return t;
  }

  void expect_empty() const {
    if (names_.empty()) return;
    const std::string& name = names_.begin()->second;
    throw Error(
        Errc::kIo,
        files_.info(name).file + ": the tensor " + shown(name) + " belongs to no part of a " +
            c_.model_type + " as config.json has it" +
            (names_.size() > 1 ? ", nor do " + std::to_string(names_.size() - 1) + " others" : ""));
  }

 private:
  std::optional<std::string> renamed(const std::string& name) const {
    if (name.find("mtp.") != std::string::npos) return std::nullopt;
    for (const std::string& beginning : c_.foreign.left_out) {
      if (name.starts_with(beginning)) return std::nullopt;
    }
    std::string known = name.starts_with(c_.prefix) ? name : c_.prefix + name;
    for (const auto& [theirs, ours] : c_.foreign.replaced) {
      if (name.starts_with(theirs)) known = ours + name.substr(theirs.size());
    }
    if (c_.plan.tied && known.starts_with(c_.prefix + "lm_head.")) return std::nullopt;
    return known;
  }

  const formats::ModelFiles& files_;
  const Config& c_;
  bool numbers_;
  std::map<std::string, std::string> names_;  // MLX's -> the file's
  bool foreign_ = false;
};

// Without an encoder tensors have no memory, and all else is checked the same.
class Loader {
 public:
  Loader(Source& source, const Config& config, std::string path, CommandEncoder* encoder,
         const LoadOptions& options, std::size_t all)
      : source_(source),
        c_(config),
        path_(std::move(path)),
        encoder_(encoder),
        options_(options),
        all_(all) {}

  void fill(const Slot& slot) {
    if (slot.is_weight) {
      *slot.weight = weight(slot);
    } else {
      *slot.tensor = tensor(slot);
    }
  }

 private:
  [[noreturn]] void fail(const std::string& name, const std::string& what) const {
    throw Error(Errc::kIo, path_ + ": the tensor " + name + " " + what);
  }

  void expect(const std::string& name, const Tensor& t, const Shape& shape) const {
    if (!(t.shape() == shape)) {
      fail(name, "must be " + to_string(shape) + " by config.json, got " + to_string(t.shape()));
    }
    if (!is_kernel_float(t.dtype())) {
      fail(name, std::string("must be f32, f16 or bf16, got ") + name_of(t.dtype()));
    }
  }

  // Where the encoder works; on the CPU the file's own memory.
  Tensor placed(const Tensor& t) {
    done_ += t.bytes();
    if (options_.progress) options_.progress(done_, all_);
    return encoder_ == nullptr ? t : encoder_->place(t);
  }

  Tensor tensor(const Slot& slot) {
    Tensor t = source_.take(slot.name);
    // [C, K, 1], or [C, 1, K]: the same bytes.
    if (slot.role == Role::kConv && t.shape() == Shape{slot.shape[0], 1, slot.shape[1]}) {
      t = t.reshape(slot.file_shape);
    }
    expect(slot.name, t, slot.file_shape);
    t = placed(t).reshape(slot.shape);
    // Hugging Face's norms multiply by 1 + w; that of a delta net's result by w.
    const bool from_0 = source_.is_foreign() && slot.role == Role::kNorm;
    if (encoder_ == nullptr || !from_0) return t;
    return ops::add(*encoder_, t, encoder_->full({}, t.dtype(), 1));
  }

  nn::Weight weight(const Slot& slot) {
    const auto listed = c_.quantization.of.find(slot.name);
    const bool is_listed = listed != c_.quantization.of.end();
    const bool scaled = source_.has(slot.name + ".scales");
    const Packing packing = c_.quantization.of_module(slot.name);
    if (packing.bits > 0 && (scaled || is_listed)) return packed(slot, packing);
    if (scaled)
      fail(slot.name + ".scales", "is there, but config.json does not say how it is packed");
    if (slot.experts > 0 && !source_.has(slot.name + ".weight")) return stacked(slot);
    const Tensor t = source_.take(slot.name + ".weight");
    expect(slot.name + ".weight", t, slot.shape);
    return placed(t);
  }

  nn::Weight packed(const Slot& slot, const Packing& packing) {
    const std::int64_t in = slot.shape.back();
    Shape codes = slot.shape, groups = slot.shape;
    codes[codes.rank() - 1] = in * packing.bits / 32;
    groups[groups.rank() - 1] = in / packing.group_size;
    ops::QuantizedWeight w;
    w.bits = packing.bits;
    w.group_size = packing.group_size;
    w.codes = source_.take(slot.name + ".weight");
    w.scales = source_.take(slot.name + ".scales");
    w.biases = source_.take(slot.name + ".biases");
    if (in % packing.group_size != 0) {
      fail(slot.name + ".weight", "has rows of " + std::to_string(in) +
                                      " numbers, which groups of " +
                                      std::to_string(packing.group_size) + " do not divide");
    }
    if (!(w.codes.shape() == codes) || w.codes.dtype() != DType::kU32) {
      fail(slot.name + ".weight", "must be " + to_string(codes) + " u32 for " +
                                      std::to_string(packing.bits) + " bits in groups of " +
                                      std::to_string(packing.group_size) + ", got " +
                                      to_string(w.codes.shape()) + " " + name_of(w.codes.dtype()));
    }
    expect(slot.name + ".scales", w.scales, groups);
    expect(slot.name + ".biases", w.biases, groups);
    if (w.biases.dtype() != w.scales.dtype()) {
      fail(slot.name + ".biases", std::string("must be of the scales' type ") +
                                      name_of(w.scales.dtype()) + ", got " +
                                      name_of(w.biases.dtype()));
    }
    w.codes = placed(w.codes);
    w.scales = placed(w.scales);
    w.biases = placed(w.biases);
    return w;
  }

  // Experts as Hugging Face has them: [E, 2·I, H] of gate and up, and [E, H, I]; or one tensor for each.
  nn::Weight stacked(const Slot& slot) {
    const std::size_t cut = slot.name.rfind(".switch_mlp.");
    const std::string mlp = slot.name.substr(0, cut) + ".experts.";
    const std::string part = slot.name.substr(cut + std::string(".switch_mlp.").size());
    if (source_.has(mlp + "down_proj") || gate_up_.count(mlp) != 0) {
      if (part == "down_proj") {
        const Tensor t = source_.take(mlp + part);
        expect(mlp + part, t, slot.shape);
        return placed(t);
      }
      const Shape both{slot.shape[0], 2 * slot.shape[1], slot.shape[2]};
      auto [at, is_new] = gate_up_.try_emplace(mlp);
      if (is_new) {
        at->second = source_.take(mlp + "gate_up_proj");
        expect(mlp + "gate_up_proj", at->second, both);
        at->second = placed(at->second);
      }
      const std::int64_t start = part == "gate_proj" ? 0 : slot.shape[1];
      const Tensor half =
          encoder_ == nullptr
              ? Tensor::meta(slot.shape, at->second.dtype())
              : encoder_->contiguous(at->second.slice(1, start, start + slot.shape[1]));
      if (start != 0) gate_up_.erase(at);  // gate came before
      return half;
    }
    Tensor all;
    for (std::int64_t e = 0; e < slot.shape[0]; ++e) {
      const std::string name = mlp + std::to_string(e) + "." + part + ".weight";
      if (e == 0 && !source_.has(name))
        source_.take(slot.name + ".weight");  // names what is missing
      const Tensor t = source_.take(name);
      expect(name, t, {slot.shape[1], slot.shape[2]});
      if (e == 0) {
        all = encoder_ == nullptr ? Tensor::meta(slot.shape, t.dtype())
                                  : encoder_->empty(slot.shape, t.dtype());
      }
      if (t.dtype() != all.dtype()) fail(name, "has another type than the experts before it");
      if (encoder_ != nullptr) encoder_->copy(placed(t), all.select(0, e));
    }
    return all;
  }

  Source& source_;
  const Config& c_;
  std::string path_;
  CommandEncoder* encoder_;
  const LoadOptions& options_;
  std::size_t all_, done_ = 0;
  std::map<std::string, Tensor> gate_up_;
};

// All of the embedding's type; norms, filters, A_log and dt_bias may be f32.
void expect_one_type(const Model& model, const std::vector<Slot>& slots, const std::string& path) {
  for (const Slot& slot : slots) {
    const DType type = slot.is_weight ? slot.weight->dtype() : slot.tensor->dtype();
    const bool may_be_wide = !slot.is_weight && slot.role != Role::kBias;
    if (type == model.dtype() || (may_be_wide && type == DType::kF32)) continue;
    throw Error(Errc::kIo, path + ": the tensor " + slot.name + " is " + name_of(type) +
                               ", the embedding " + name_of(model.dtype()) +
                               ": weights must be of one type");
  }
}

Model load(const std::string& directory, CommandEncoder* encoder, const LoadOptions& options) {
  Model model;
  model.config = Config::parse(formats::read_model_config(directory), directory + "/config.json",
                               options.architecture);
  const formats::ModelFiles files(directory);
  Source source(files, model.config, encoder != nullptr);
  Loader loader(source, model.config, directory, encoder, options, files.total_bytes());
  const std::vector<Slot> all = slots(model.weights, model.config);
  for (const Slot& slot : all) loader.fill(slot);
  source.expect_empty();
  expect_one_type(model, all, directory);
  return model;
}

}  // namespace

Model load_model(const std::string& directory, CommandEncoder& encoder,
                 const LoadOptions& options) {
  Model model = load(directory, &encoder, options);
  model.ropes = make_ropes(model.config.plan, encoder, model.dtype());
  encoder.commit_and_wait();
  return model;
}

Model load_shapes(const std::string& directory) { return load(directory, nullptr, {}); }

void save_model(const Model& model, const std::string& directory, const SaveOptions& options) {
  formats::ModelToSave out;
  if (has_lora(model)) {
    throw Error(
        Errc::kArgument,
        "save_model: the model has adapters, which would be lost: fuse_lora makes them part "
        "of the weights, save_adapters saves them apart");
  }
  for (const auto& [name, tensor, file_shape] : parameters(model)) {
    const Tensor t = tensor.detach();
    out.tensors.push_back({name, t.shape() == file_shape ? t : t.reshape(file_shape)});
  }
  out.parameters = parameter_count(model.config);
  out.config = model.config.json;
  out.source = options.files_from;
  out.shard_bytes = options.shard_bytes;
  formats::save_model(directory, out, options.replace);
}

}  // namespace mlxtape::models
