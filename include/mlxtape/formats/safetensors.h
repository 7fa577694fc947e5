// safetensors: tensors by name in one file.
//
// Layout     8 bytes, little-endian: the length of the header. The header: JSON, {"name": {"dtype": "BF16",
//            "shape": [2, 3], "data_offsets": [begin, end]}, ..., "__metadata__": {"key": "text"}}. Then the data, which
//            the offsets count from. Values are little-endian, rows first.
// Types      BOOL, U8 to U64, I8 to I64, F16, BF16, F32, F64. The floats of 8 bits (F8_E4M3, F8_E5M2, F8_E8M0) are
//            read as u8. A tensor of any other type may be in a file, and is an error (kDType) when it is asked for.
// Reading    No order and no alignment is assumed; gaps are allowed, bytes behind the last tensor are not. All that the
//            header says is checked when the file is opened, no data is touched. Errors are kIo and name file and tensor.
// Writing    Keys sorted, the header filled up to 8 bytes with spaces, wide types first: each tensor lies at a
//            multiple of its element size and can be used in place. Data without gaps, which other readers ask for.
//
// Threads    A SafetensorsFile may be used from any thread at any time.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mlxtape/base/files.h"
#include "mlxtape/core/tensor.h"

namespace mlxtape::formats {

struct TensorInfo {
  std::string type;            // the file's name of the type: "BF16"
  std::optional<DType> dtype;  // what it is read as, if it can be
  Shape shape;
  std::size_t bytes = 0;
  std::string file;
};

class SafetensorsFile {
 public:
  explicit SafetensorsFile(std::string path);

  const std::string& path() const { return path_; }
  const std::vector<std::string>& names() const { return names_; }  // sorted
  bool has(std::string_view name) const { return entries_.find(name) != entries_.end(); }
  const TensorInfo& info(std::string_view name) const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  // On the cpu device, in place: the file stays mapped as long as any tensor of it lives, and what is written to
  // the tensor never comes to the file. Only a tensor that does not lie at a multiple of its element size is copied.
  Tensor tensor(std::string_view name) const;
  // Where they are mapped, at any alignment: for copies to another place.
  std::span<const std::byte> bytes(std::string_view name) const;

  // Of a file that write_checked_safetensors made: reads all of it, and throws kIo where a byte has changed since, or where
  // it has no checksum.
  void verify() const;

 private:
  struct Entry {
    TensorInfo info;
    std::size_t begin = 0;  // in the file
  };

  [[noreturn]] void fail(const std::string& what) const;
  [[noreturn]] void fail(std::string_view tensor, const std::string& what) const;
  void read_header();
  const Entry& entry(std::string_view name) const;
  std::span<std::byte> checked_bytes(std::string_view name) const;
  void check_overlaps() const;

  std::string path_;
  std::shared_ptr<MappedFile> file_;
  std::map<std::string, Entry, std::less<>> entries_;
  std::vector<std::string> names_;
  std::map<std::string, std::string> metadata_;
};

struct NamedTensor {
  std::string name;
  Tensor tensor;  // on any device, of any strides
};

// The file is there whole or not at all (base/files.h), and a link in its place is replaced. Memory of a device comes to the host in pieces; a tensor that is not
// contiguous is copied first. Throws kArgument for a name that comes twice, is no UTF-8 or is "__metadata__", and for a
// tensor without memory.
void write_safetensors(const std::string& path, std::span<const NamedTensor> tensors,
                       const std::map<std::string, std::string>& metadata = {});

// The same with one more tensor at the end of the file, U8 [8]: the checksum (base/checksum.h) of all bytes before it.
inline constexpr const char* kChecksumTensor = "__checksum__";
void write_checked_safetensors(const std::string& path, std::span<const NamedTensor> tensors,
                               const std::map<std::string, std::string>& metadata = {});

}  // namespace mlxtape::formats
