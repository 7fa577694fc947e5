#include "mlxtape/formats/gguf_tokenizer.h"
#include "mlxtape/formats/model_directory.h"
#include "mlxtape/models/load.h"
#include "mlxtape/models/lora.h"
#include "mlxtape/models/size.h"

namespace mlxtape::models {

namespace {

// Every tensor of a file, as it lies there. who: what errors begin with.
std::vector<formats::NamedTensor> tensors_of(const Model& model, const std::string& who) {
  if (has_lora(model)) {
    throw Error(Errc::kArgument,
                who +
                    ": the model must not have adapters, which would be lost: fuse them into the "
                    "weights with fuse_lora, or save them with save_adapters");
  }
  std::vector<formats::NamedTensor> tensors;
  for (const auto& [name, tensor, file_shape] : parameters(model)) {
    const Tensor t = tensor.detach();
    tensors.push_back({name, t.shape() == file_shape ? t : t.reshape(file_shape)});
  }
  return tensors;
}

}  // namespace

void save_model(const Model& model, const std::string& directory, const SaveOptions& options) {
  formats::ModelToSave out;
  out.tensors = tensors_of(model, "save_model");
  out.parameters = parameter_count(model.config);
  out.config = model.config.json;
  out.source = options.files_from;
  out.shard_bytes = options.shard_bytes;
  formats::save_model(directory, out, options.replace);
}

formats::GgufExported save_gguf(const Model& model, const std::string& path,
                                const SaveGgufOptions& options) {
  formats::GgufExport out;
  out.tensors = tensors_of(model, "save_gguf");
  out.config = model.config.json;
  out.name = options.name;
  out.matrices = options.matrices;
  out.otherwise = options.otherwise;
  out.part_bytes = options.part_bytes;
  if (!options.files_from.empty()) {
    out.more = formats::gguf_tokenizer_keys(options.files_from, model.config.plan.vocabulary);
  }
  return formats::export_gguf(path, out);
}

}  // namespace mlxtape::models
