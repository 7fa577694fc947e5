#include "mlxtape/formats/gguf.h"

#include <cstring>
#include <optional>

#include "fuzz/targets.h"
#include "mlxtape/formats/gguf_model.h"
#include "mlxtape/formats/gguf_tokenizer.h"
#include "mlxtape/formats/gguf_write.h"
#include "mlxtape/models/config.h"
#include "support/temp_folder.h"

namespace mlxtape::fuzz {

namespace {

using formats::GgufFile;
using formats::GgufModel;
using formats::GgufTensor;

// Numbers of all tensors together: blocks of 2 bits are 16 times as long in f32, and a fuzzer has no time for more.
constexpr std::int64_t kMostNumbers = std::int64_t{1} << 20U;

void check_tensors(const GgufFile& file, std::string_view input) {
  std::size_t bytes = 0;
  std::int64_t numbers = 0;
  for (const auto& [name, tensor] : file.tensors()) {
    const std::span<const std::byte> data = file.bytes(tensor);
    bytes += data.size();
    check(data.size() == tensor.bytes, "a tensor has the bytes that its entry has", name);
    check(data.empty() || std::memcmp(data.data(), input.data() + tensor.begin, data.size()) == 0,
          "a tensor is where the file says", name);
    const std::int64_t count = *element_count(tensor.shape);
    if (numbers + count > kMostNumbers) continue;
    numbers += count;
    std::vector<float> values(static_cast<std::size_t>(count));
    formats::dequantize(tensor.type, data, values);
  }
  check(bytes <= input.size(), "no byte belongs to two tensors");
}

// What was read is written, and read again.
void check_written(const GgufFile& file, const std::string& output) {
  std::vector<formats::GgufTensorToWrite> tensors;
  for (const auto& [name, tensor] : file.tensors()) {
    if (name.size() > 63) return;  // read, but not written
    tensors.push_back({name, tensor.shape, tensor.type, [&file, &tensor](const auto& put) {
                         put(file.bytes(tensor));
                       }});
  }
  formats::write_gguf(output, {}, tensors);
  const GgufFile again(output);
  check(again.tensors().size() == tensors.size(), "every tensor is written");
  for (const auto& [name, tensor] : file.tensors()) {
    const GgufTensor& other = again.tensor(name);
    const auto a = file.bytes(tensor), b = again.bytes(other);
    check(other.shape == tensor.shape && other.type == tensor.type && a.size() == b.size() &&
              std::memcmp(a.data(), b.data(), a.size()) == 0,
          "a tensor is read as it was written", name);
  }
}

void check_model(const std::string& path) {
  std::optional<GgufModel> model;
  if (!accepts([&] { model.emplace(path); })) return;
  std::size_t bytes = 0;
  for (const std::string& name : model->names()) {
    const formats::TensorInfo& info = model->info(name);
    bytes += info.bytes;
    if (info.bytes > std::size_t{1} << 22U) continue;
    accepts([&] {
      const Tensor t = model->tensor(name);
      check(t.shape() == info.shape && t.dtype() == *info.dtype && t.bytes() == info.bytes,
            "a tensor is what the model says of it", name);
    });
  }
  check(bytes == model->total_bytes(), "the bytes of tensors add up");
  accepts([&] { models::Config::parse(model->config(), path); });
}

void check_tokenizer(const GgufFile& file, const std::string& path) {
  accepts([&] {
    const auto tokenizer = formats::read_gguf_tokenizer(file);
    if (!tokenizer) return;
    const auto t = formats::Tokenizer::from_gguf(path);
    t.decode(t.encode("Hello w\u00f6rld 12"));
  });
}

}  // namespace

bool gguf(std::string_view input) {
  static const test::TempFolder folder;
  static const std::string path = folder / "input.gguf", output = folder / "output.gguf";
  test::put(path, input);
  std::optional<GgufFile> file;
  if (!accepts([&] { file.emplace(path); })) return false;
  check_tensors(*file, input);
  check_written(*file, output);
  check_tokenizer(*file, path);
  check_model(path);
  return true;
}

}  // namespace mlxtape::fuzz
