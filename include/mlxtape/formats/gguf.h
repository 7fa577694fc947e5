// GGUF: metadata and tensors in one file, or in several that belong together; llama.cpp's format.
//
// Layout     "GGUF" | u32 version | u64 tensors | u64 keys | keys × {string key, u32 type, value}
//            | tensors × {string name, u32 dims, u64 dim[dims], u32 type, u64 offset}
//            | zeros up to a multiple of the alignment | data, which offsets count from.
//            A string is u64 bytes and UTF-8. All numbers are little-endian. dim[0] is the length of a row, so shapes here are
//            turned around: outermost first, as everywhere else in this library.
// Reading    Versions 2 and 3. All that the file says of itself is checked when it is opened; no data is touched. Tensors must
//            lie at multiples of the alignment, inside the file and apart from each other; gaps are allowed. A file
//            NAME-00001-of-00003.gguf is opened together with the others; any other part is refused.
// Errors     kIo, "gguf: path: what must hold, got what came".
//
// Threads    A GgufFile may be used from any thread at any time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "mlxtape/base/files.h"
#include "mlxtape/core/tensor.h"
#include "mlxtape/formats/gguf_types.h"

namespace mlxtape::formats {

enum class GgufValueType : std::uint32_t {
  kU8 = 0,
  kI8 = 1,
  kU16 = 2,
  kI16 = 3,
  kU32 = 4,
  kI32 = 5,
  kF32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kU64 = 10,
  kI64 = 11,
  kF64 = 12,
};
const char* name_of(GgufValueType type);  // "u32"

// Elements as they lie in the mapped file: `count` values of one type, checked when the file was opened.
struct GgufArray {
  GgufValueType of = GgufValueType::kU8;
  std::uint64_t count = 0;
  std::span<const std::byte> bytes;
};

struct GgufValue {
  GgufValueType type = GgufValueType::kU8;
  // Whole numbers but u64 as i64. Strings and arrays live as long as the file.
  std::variant<std::int64_t, std::uint64_t, double, bool, std::string_view, GgufArray> value;
};

struct GgufTensor {
  Shape shape;  // outermost first
  GgufType type = GgufType::kF32;
  std::size_t part = 0;   // which of files()
  std::size_t begin = 0;  // in that file
  std::size_t bytes = 0;
};

// Does the name end in .gguf, and is it no folder?
bool is_gguf_path(const std::string& path);

class GgufFile {
 public:
  explicit GgufFile(const std::string& path);

  const std::string& path() const { return path_; }
  const std::vector<std::string>& files() const { return files_; }
  std::uint32_t version() const { return version_; }
  std::size_t alignment() const { return alignment_; }

  const std::map<std::string, GgufValue, std::less<>>& metadata() const { return metadata_; }
  const std::map<std::string, GgufTensor, std::less<>>& tensors() const { return tensors_; }
  bool has(std::string_view tensor) const { return tensors_.find(tensor) != tensors_.end(); }
  const GgufTensor& tensor(std::string_view name) const;
  std::span<const std::byte> bytes(const GgufTensor& tensor) const;
  // Its bytes as a tensor of a plain type and of a shape with as many elements, aligned for it: in place, and the file
  // stays mapped as long as the tensor lives. What is written to it never comes to the file.
  Tensor in_place(const GgufTensor& tensor, DType dtype, const Shape& shape) const;
  std::size_t total_bytes() const { return total_bytes_; }  // of all tensors

  // Values of a key, or nothing where the file has no such key. A value of another kind is an error. A whole number may be of
  // any type that holds it, and a number may be whole.
  std::optional<std::int64_t> whole(std::string_view key) const;
  std::optional<double> number(std::string_view key) const;
  std::optional<bool> truth(std::string_view key) const;
  std::optional<std::string_view> text(std::string_view key) const;
  // Of arrays.
  std::optional<std::vector<std::string_view>> texts(std::string_view key) const;
  std::optional<std::vector<std::int64_t>> wholes(std::string_view key) const;
  std::optional<std::vector<double>> numbers(std::string_view key) const;
  bool is_array(std::string_view key) const;

  [[noreturn]] void fail(const std::string& what) const;
  [[noreturn]] void fail_key(std::string_view key, const std::string& what) const;

 private:
  const GgufValue* find(std::string_view key) const;
  const GgufArray* array(std::string_view key, const char* what) const;
  void read(const std::string& path, std::size_t part);
  void open_other_parts();

  std::string path_;
  std::vector<std::string> files_;
  std::vector<std::shared_ptr<MappedFile>> maps_;
  std::uint32_t version_ = 0;
  std::size_t alignment_ = 0;
  std::map<std::string, GgufValue, std::less<>> metadata_;  // of the first part
  std::map<std::string, GgufTensor, std::less<>> tensors_;
  std::size_t total_bytes_ = 0;
};

}  // namespace mlxtape::formats
