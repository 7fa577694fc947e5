// Model directories as mlx-lm reads and writes them: config.json, the weights in model*.safetensors, and what else a
// model needs (tokenizer, chat template, ...).
//
// Errors are kIo and name the folder, file or tensor.
//
// Threads    ModelFiles may be used from any thread at any time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mlxtape/base/error.h"
#include "mlxtape/formats/gguf_model.h"
#include "mlxtape/formats/json.h"
#include "mlxtape/formats/safetensors.h"

namespace mlxtape::formats {

// The weights of every model*.safetensors in a folder, of one such file, or of a GGUF file (gguf_model.h), by name. The same name
// in two files is an error. Opening reads headers alone: the data is read from the disk when it is used.
class ModelFiles {
 public:
  explicit ModelFiles(const std::string& path);

  const std::string& path() const { return path_; }
  const std::vector<std::string>& names() const { return names_; }  // sorted
  bool has(std::string_view name) const;
  const TensorInfo& info(std::string_view name) const;
  Tensor tensor(std::string_view name) const;  // in place, as SafetensorsFile's and GgufModel's
  // For copies to another place, at any alignment. The bytes live as long as the owner or these ModelFiles.
  struct Bytes {
    std::span<const std::byte> bytes;
    Tensor owner;
  };
  Bytes bytes(std::string_view name) const;
  std::size_t total_bytes() const { return total_bytes_; }
  const std::vector<std::string>& files() const { return paths_; }  // sorted

 private:
  const SafetensorsFile& file(std::string_view name) const;

  std::string path_;
  std::vector<std::string> paths_;
  std::vector<SafetensorsFile> files_;
  std::shared_ptr<const GgufModel> gguf_;  // in place of files
  std::map<std::string, std::size_t, std::less<>> file_of_;
  std::vector<std::string> names_;
  std::size_t total_bytes_ = 0;
};

// A folder with a .gguf file and no config.json is an error that says what to do instead.
Check gguf_check(const std::string& path);

// The config.json of a folder, an object; of a GGUF file the one that GgufModel makes.
Json read_model_config(const std::string& path);
// What errors about it name: folder/config.json, or the GGUF file.
std::string model_config_path(const std::string& path);

struct ModelToSave {
  std::vector<NamedTensor> tensors;  // on any devices
  Json config = Json::Object{};      // an object
  // Files of the folder `source` whose names fit one of these patterns (* any text, ? one character) come along; of a GGUF file
  // its tokenizer. Empty: none.
  std::string source;
  std::vector<std::string> companions = {"tokenizer*",
                                         "special_tokens_map.json",
                                         "added_tokens.json",
                                         "vocab.json",
                                         "merges.txt",
                                         "*.jinja",
                                         "*.tiktoken",
                                         "tiktoken.model",
                                         "tekken.json",
                                         "generation_config.json",
                                         "chat_template.json",
                                         "preprocessor_config.json",
                                         "*.py"};
  // What the index gives as total_parameters; by default the number of elements. Quantised weights have more.
  std::optional<std::int64_t> parameters;
  std::size_t shard_bytes = std::size_t{5} << 30U;
};

// Writes config.json, the weights (model.safetensors, or model-00001-of-0000N.safetensors: filled in the order of
// `tensors` to at most shard_bytes each, unless one tensor has more), model.safetensors.index.json and the companions.
//
// The folder is made beside its place and renamed when all of it is on the disk. A folder that is not empty is refused; with
// `replace` the two are exchanged once the new one is complete, and the old one's files are removed, if replace_fault finds
// nothing then either. After an error everything is as it was. A process that is killed leaves <folder>.tmp<process>.<number>
// beside it, and <...>.lock, by which the next save_model knows that it is nobody's any more and takes it away; what has no
// such file stays. If the machine stops between two renames, on a file system that cannot exchange names, the old folder lies
// there too, its name ending in .old.
void save_model(const std::string& folder, const ModelToSave& model, bool replace = false);

// Gives a folder that is missing its name again, where a process that was killed has moved it aside as above.
void restore_moved_model(const std::string& folder);

// Why a folder must not be replaced by a model, in words that follow its name: "contains notes.txt, which is not part of a
// model". Empty: it is absent or empty, or a model's: its config.json names a model_type, it has weights, and every other
// entry is a file of exactly a name that save_model or mlx-lm gives. Code, templates and what else comes along (tokenizer_x.json,
// *.tiktoken) may be a user's own work: they must be the same, byte for byte, in the folder `source`, from which the new model
// has them. README.md must be as mlx-lm writes it, merges.txt as tokenizers do.
std::string replace_fault(const std::string& folder, const std::string& source = "");

// Removes what replace_fault finds nothing wrong with, and the folder where nothing else is in it.
void remove_replaced_model(const std::string& folder, const std::string& source);
// Of a folder that save_model has made itself: also what it copies along, and what was half written.
void remove_model_files(const std::string& folder);

}  // namespace mlxtape::formats
