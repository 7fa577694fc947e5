// Files that end with their checksum.
#include <vector>

#include "formats/support.h"
#include "mlxtape/base/files.h"
#include "mlxtape/core/device.h"
#include "mlxtape/formats/safetensors.h"

namespace mlxtape::formats {
namespace {

namespace fs = std::filesystem;

std::vector<NamedTensor> some_tensors() {
  const Tensor wide = Device::cpu().zeros({3}, DType::kF32);
  wide.host<float>()[1] = 7;
  const Tensor narrow = Device::cpu().zeros({5}, DType::kU8);
  return {{"narrow", narrow}, {"wide", wide}};
}

TEST(CheckedSafetensors, EveryByteCounts) {
  const TempFolder folder;
  const std::string path = folder / "a";
  write_checked_safetensors(path, some_tensors(), {{"step", "3"}});
  const std::string good = read_whole(path, "test");
  const SafetensorsFile file(path);
  file.verify();
  EXPECT_EQ(file.tensor("wide").host<float>()[1], 7);
  EXPECT_EQ(file.names(), (std::vector<std::string>{kChecksumTensor, "narrow", "wide"}));
  EXPECT_EQ(file.metadata().at("step"), "3");
  for (std::size_t i = 0; i < good.size(); ++i) {
    std::string bytes = good;
    bytes[i] = static_cast<char>(bytes[i] ^ 1);
    put(path, bytes);
    EXPECT_NE(message_of([&] { SafetensorsFile(path).verify(); }), "no error") << "byte " << i;
  }
  std::string changed = good;
  changed[good.size() - 9] = 'x';  // of narrow, the last before the checksum
  put(path, changed);
  EXPECT_EQ(message_of([&] { SafetensorsFile(path).verify(); }, Errc::kIo, folder / ""),
            "safetensors: a: its bytes are not those that were written (checksum)");
}

TEST(CheckedSafetensors, WithoutAChecksumNothingIsVerified) {
  const TempFolder folder;
  const std::string path = folder / "a";
  const auto said = [&] {
    return message_of([&] { SafetensorsFile(path).verify(); }, Errc::kIo, folder / "");
  };
  const std::string none = "safetensors: a: must end with its checksum, got none";
  write_safetensors(path, some_tensors());
  EXPECT_EQ(said(), none);
  // By its name alone, of another size, and not at the end.
  std::vector<NamedTensor> tensors = some_tensors();
  tensors.push_back({kChecksumTensor, Device::cpu().zeros({8}, DType::kU8)});
  tensors.push_back({"last", Device::cpu().zeros({1}, DType::kU8)});
  write_safetensors(path, tensors);
  EXPECT_EQ(said(), none);
  EXPECT_EQ(
      message_of([&] { write_checked_safetensors(path, tensors); }, Errc::kArgument, folder / ""),
      "safetensors: a: tensor \"__checksum__\": must have another name");
}

TEST(CheckedSafetensors, ALinkIsReplaced) {
  const TempFolder folder;
  put(folder / "outside", "mine");
  for (const bool checked : {false, true}) {
    fs::remove(folder / "link");
    fs::create_symlink("outside", folder / "link");
    if (checked) {
      write_checked_safetensors(folder / "link", some_tensors());
    } else {
      write_safetensors(folder / "link", some_tensors());
    }
    EXPECT_FALSE(fs::is_symlink(folder / "link"));
    EXPECT_EQ(read_whole(folder / "outside", "test"), "mine");
    EXPECT_TRUE(SafetensorsFile(folder / "link").has("wide"));
  }
}

}  // namespace
}  // namespace mlxtape::formats
