// A GGUF file as a model in MLX's form: config.json, and tensors under MLX's names.
//
// Weights    Quantised types with an exact affine form in groups of 32 stay quantised: codes u32, scales and biases (names.weight,
//            .scales, .biases; mlxtape/ops/quantize.h). All others become plain numbers, among them Q2_K, Q3_K and Q6_K, whose
//            groups are of 16. Rows that GGUF has in another order are moved, not quantised anew.
// Types      All of a model's numbers have the narrowest type that holds every weight exactly: f16, bf16 or f32. Norms and other
//            vectors in f32 stay so. No weight is rounded; biases of linear layers are, to the model's type.
// Errors     kIo: an architecture or a tensor that is not known, sizes that do not fit each other.
//
// Threads    A GgufModel may be used from any thread at any time.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "mlxtape/core/tensor.h"
#include "mlxtape/formats/gguf.h"
#include "mlxtape/formats/json.h"
#include "mlxtape/formats/safetensors.h"

namespace mlxtape::formats {

class GgufModel {
 public:
  explicit GgufModel(const std::string& path);
  GgufModel(const GgufModel&) = delete;
  GgufModel& operator=(const GgufModel&) = delete;
  ~GgufModel();

  const GgufFile& file() const { return file_; }
  const Json& config() const { return config_; }

  const std::vector<std::string>& names() const { return names_; }  // sorted
  bool has(std::string_view name) const;
  const TensorInfo& info(std::string_view name) const;  // type: the file's, "Q4_K"
  std::size_t total_bytes() const { return total_bytes_; }

  // On the cpu device: in place where the file has the same numbers in the same order, else converted, each time anew.
  Tensor tensor(std::string_view name) const;

 private:
  struct Entry;
  const Entry& entry(std::string_view name) const;
  void add(std::string name, Entry entry);

  GgufFile file_;
  Json config_;
  std::map<std::string, std::unique_ptr<Entry>, std::less<>> entries_;
  std::vector<std::string> names_;
  std::size_t total_bytes_ = 0;
};

}  // namespace mlxtape::formats
