#include "mlxtape/formats/safetensors.h"

#include <cstring>
#include <optional>

#include "fuzz/targets.h"
#include "mlxtape/formats/json.h"
#include "support/temp_folder.h"

namespace mlxtape::fuzz {

namespace {

using formats::Json;
using formats::NamedTensor;
using formats::SafetensorsFile;

bool same(const Tensor& t, const void* bytes, std::size_t size) {
  return t.bytes() == size && (size == 0 || std::memcmp(t.data(), bytes, size) == 0);
}

// The bytes of a tensor, by what the header says of it and nothing else.
std::string_view bytes_of(std::string_view file, const Json& header, const std::string& name) {
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof length);
  const Json::Array& offsets = header.find(name)->find("data_offsets")->array();
  const auto begin = static_cast<std::size_t>(offsets[0].integer());
  const auto end = static_cast<std::size_t>(offsets[1].integer());
  return file.substr(sizeof length + length).substr(begin, end - begin);
}

Json header_of(std::string_view file) {
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof length);
  return Json::parse(file.substr(sizeof length, length), "header");
}

void check_written(const std::string& path, const std::vector<NamedTensor>& tensors,
                   const std::map<std::string, std::string>& metadata) {
  formats::write_safetensors(path, tensors, metadata);
  const SafetensorsFile again(path);
  check(again.names().size() == tensors.size(), "every tensor is written");
  check(again.metadata() == metadata, "metadata are written");
  for (const NamedTensor& item : tensors) {
    const Tensor t = again.tensor(item.name);
    check(t.shape() == item.tensor.shape() && t.dtype() == item.tensor.dtype() &&
              same(t, item.tensor.data(), item.tensor.bytes()),
          "a tensor is read as it was written", item.name);
  }
}

}  // namespace

bool safetensors(std::string_view input) {
  static const test::TempFolder folder;
  static const std::string path = folder / "input.safetensors",
                           output = folder / "output.safetensors";
  test::put(path, input);
  std::optional<SafetensorsFile> file;
  if (!accepts([&] { file.emplace(path); })) return false;

  std::optional<Json> header;  // one with a key twice where it does not matter is read all the same
  accepts([&] { header = header_of(input); });
  std::vector<NamedTensor> tensors;
  std::size_t bytes = 0;
  for (const std::string& name : file->names()) {
    bytes += file->info(name).bytes;
    Tensor t;
    if (!accepts([&] { t = file->tensor(name); })) continue;
    check(t.bytes() == file->info(name).bytes, "a tensor has the bytes that its entry has");
    if (header) {
      const std::string_view want = bytes_of(input, *header, name);
      check(same(t, want.data(), want.size()), "a tensor is where the header says", name);
    }
    tensors.push_back({name, t});
  }
  check(bytes <= input.size(), "no byte belongs to two tensors");
  check_written(output, tensors, file->metadata());
  return true;
}

}  // namespace mlxtape::fuzz
