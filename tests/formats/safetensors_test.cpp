#include "mlxtape/formats/safetensors.h"

#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <numeric>

#include "formats/support.h"
#include "mlxtape/core/device.h"
#include "mlxtape/core/encoder.h"
#include "support/op_test.h"

namespace mlxtape::formats {
namespace {

std::string golden(const std::string& name) { return std::string(MLXTAPE_GOLDEN) + "/" + name; }

Tensor golden_tensor(const Shape& shape, DType dtype) {
  Tensor t = Device::cpu().zeros(shape, dtype);
  visit(dtype, [&](auto zero) {
    auto values = t.host<decltype(zero)>();
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = golden_value(static_cast<std::int64_t>(i), zero);
    }
  });
  return t;
}

std::string bytes_of(const Tensor& t) {
  return t.size() == 0 ? "" : std::string(static_cast<const char*>(t.data()), t.bytes());
}

void expect_golden(const SafetensorsFile& file, const std::string& name, const Shape& shape,
                   DType dtype) {
  const Tensor t = file.tensor(name);
  EXPECT_EQ(t.dtype(), dtype) << name;
  EXPECT_EQ(t.shape(), shape) << name;
  EXPECT_EQ(file.info(name).bytes, t.bytes());
  EXPECT_EQ(file.info(name).file, file.path());
  EXPECT_EQ(bytes_of(t), bytes_of(golden_tensor(shape, dtype))) << name;
}

// A file of that header and that much data, bytes 0, 1, 2, ...
std::string file_of(const std::string& header, std::size_t data) {
  std::string bytes(8, '\0');
  const std::uint64_t length = header.size();
  std::memcpy(bytes.data(), &length, 8);
  bytes += header;
  for (std::size_t i = 0; i < data; ++i) bytes.push_back(static_cast<char>(i));
  return bytes;
}

// ---- what others wrote ----

const std::pair<const char*, DType> kNumpyTypes[] = {
    {"bool", DType::kBool},   {"uint8", DType::kU8},   {"uint16", DType::kU16},
    {"uint32", DType::kU32},  {"uint64", DType::kU64}, {"int8", DType::kI8},
    {"int16", DType::kI16},   {"int32", DType::kI32},  {"int64", DType::kI64},
    {"float16", DType::kF16}, {"float32", DType::kF32}};

TEST(Safetensors, ReadsFilesOfNumpy) {
  const SafetensorsFile file(golden("numpy.safetensors"));
  for (const auto& [name, dtype] : kNumpyTypes) expect_golden(file, name, {2, 3}, dtype);
  expect_golden(file, "float64", {2, 3}, DType::kF64);
  expect_golden(file, "scalar", {}, DType::kF32);
  expect_golden(file, "empty", {3, 0, 2}, DType::kF32);
  EXPECT_EQ(file.names().size(), 14U);
  EXPECT_TRUE(std::is_sorted(file.names().begin(), file.names().end()));
  const std::map<std::string, std::string> metadata{{"made by", "numpy"},
                                                    {"text", "\u00e9 \"\u6c34\"\n"}};
  EXPECT_EQ(file.metadata(), metadata);
}

TEST(Safetensors, ReadsFilesOfMlx) {
  const SafetensorsFile file(golden("mlx.safetensors"));
  for (const auto& [name, dtype] : kNumpyTypes) expect_golden(file, name, {2, 3}, dtype);
  expect_golden(file, "bfloat16", {2, 3}, DType::kBF16);
  expect_golden(file, "scalar", {}, DType::kF32);
  expect_golden(file, "empty", {3, 0, 2}, DType::kF32);
  EXPECT_EQ(file.metadata().at("format"), "mlx");
  EXPECT_EQ(file.info("complex64").type, "C64");  // there, but not to be had
  EXPECT_FALSE(file.info("complex64").dtype.has_value());
  EXPECT_EQ(
      message_of([&] { file.tensor("complex64"); }, Errc::kDType,
                 std::string(MLXTAPE_GOLDEN) + "/"),
      "safetensors: mlx.safetensors: tensor \"complex64\": must be of a type of mlxtape, got C64");
  const SafetensorsFile plain(golden("mlx_plain.safetensors"));
  EXPECT_TRUE(plain.metadata().empty());
  expect_golden(plain, "w", {2, 3}, DType::kF32);
}

TEST(Safetensors, ReadsFilesOfTorch) {
  const SafetensorsFile file(golden("torch.safetensors"));
  expect_golden(file, "bf16", {5}, DType::kBF16);
  EXPECT_EQ(file.tensor("e4m3").dtype(), DType::kU8);
  EXPECT_EQ(file.info("e4m3").type, "F8_E4M3");
  // -1, 2.5, 0.5, -1.5, 2 in 1-4-3 and 1-5-2 bits
  EXPECT_EQ(bytes_of(file.tensor("e4m3")), "\xb8\x42\x30\xbc\x40");
  EXPECT_EQ(bytes_of(file.tensor("e5m2")), "\xbc\x41\x38\xbe\x40");
}

// ---- tensors in place ----

TEST(Safetensors, TensorsLieInTheFileAndOutliveIt) {
  const TempFolder folder;
  const std::string bytes = file_of(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})", 6);
  put(folder / "f", bytes);
  Tensor t;
  {
    const SafetensorsFile file(folder / "f");
    t = file.tensor("a");
    EXPECT_EQ(t.data(), file.tensor("a").data());
  }
  EXPECT_TRUE(t.buffer().is_foreign());
  EXPECT_EQ(bytes_of(t), std::string("\2\3\4\5"));
  t.host<std::uint8_t>()[0] = 99;
  EXPECT_EQ(read_whole(folder / "f", "test"), bytes);
}

TEST(Safetensors, OnlyWhatIsNotAlignedIsCopied) {
  const TempFolder folder;
  for (std::size_t shift = 0; shift < 8; ++shift) {
    std::string header =
        R"({"a":{"dtype":"U32","shape":[2],"data_offsets":[1,9]},"b":{"dtype":"U8","shape":[],"data_offsets":[0,1]}})";
    header.resize((header.size() + 7) / 8 * 8 + shift, ' ');
    put(folder / "f", file_of(header, 9));
    const SafetensorsFile file(folder / "f");
    const Tensor t = file.tensor("a");
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(t.data()) % 4, 0U);
    EXPECT_EQ(t.buffer().is_foreign(), shift % 4 == 3) << shift;
    EXPECT_EQ(t.host<std::uint32_t>()[0], 0x04030201U);
    EXPECT_EQ(t.host<std::uint32_t>()[1], 0x08070605U);
    EXPECT_TRUE(file.tensor("b").buffer().is_foreign());
  }
}

TEST(Safetensors, GapsAndEmptyTensorsAreLegal) {
  const TempFolder folder;
  put(folder / "f",
      file_of(
          R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]},"b":{"dtype":"U8","shape":[1],"data_offsets":[5,6]},)"
          R"("e":{"dtype":"F32","shape":[0,9223372036854775807,8],"data_offsets":[2,2]},)"
          R"("x":{"dtype":"F4","shape":[3],"data_offsets":[3,5],"other":[{}]}}   )",
          6));
  const SafetensorsFile file(folder / "f");
  EXPECT_EQ(bytes_of(file.tensor("a")), "\1\2");
  EXPECT_EQ(bytes_of(file.tensor("b")), "\5");
  EXPECT_EQ(file.tensor("e").size(), 0);
  EXPECT_EQ(file.info("x").bytes, 2U);
  EXPECT_FALSE(file.has("y"));
  EXPECT_TRUE(file.has("x"));
  put(folder / "f", file_of("{}", 0));
  EXPECT_TRUE(SafetensorsFile(folder / "f").names().empty());
}

// ---- lies ----

TEST(Safetensors, RefusesWhatCannotBeTrue) {
  const auto entry = [](const std::string& text) {
    return file_of("{\"w\":" + text + "}", 16);
  };
  const auto cut = [](std::string bytes, std::size_t size) {
    bytes.resize(size);
    return bytes;
  };
  const auto length = [](std::uint64_t value) {
    std::string bytes = file_of("{}", 0);
    std::memcpy(bytes.data(), &value, 8);
    return bytes;
  };
  const std::string good = R"({"dtype":"U8","shape":[16],"data_offsets":[0,16]})";
  const std::string long_name(10'000, 'n');
  const struct {
    std::string bytes, message;
  } table[] = {
      {entry(good) + std::string(100, 'x'),
       "must end where its last tensor does, got 100 bytes more"},
      {entry(good) + "x", "must end where its last tensor does, got 1 bytes more"},
      {file_of("{}", 3), "must end where its last tensor does, got 3 bytes more"},
      {file_of("{\"\\u001b[2J\":{}}", 0), "tensor \"\\x1b[2J\": must have a dtype"},
      {file_of("{\"" + long_name + "\":{}}", 0),
       "tensor \"" + long_name.substr(0, 200) + "... (10000 bytes)\": must have a dtype"},
      {"", "must begin with 8 bytes, the header's length, got 0"},
      {"1234567", "must begin with 8 bytes, the header's length, got 7"},
      {length(3),
       "must hold its header, of at most 100000000 bytes, got a length of 3 in a file of 10"},
      {length(100000001),
       "must hold its header, of at most 100000000 bytes, got a length of 100000001 in a file of "
       "10"},
      {length(1ULL << 60U),
       "must hold its header, of at most 100000000 bytes, got a length of 1152921504606846976 in a "
       "file of 10"},
      {length(~0ULL),
       "must hold its header, of at most 100000000 bytes, got a length of 18446744073709551615 in "
       "a file of 10"},
      {length(0), "header: byte 0: must be an object, got the end of the text"},
      {file_of("[]", 0), "header: byte 0: must be an object, got '['"},
      {file_of("{}x", 0), "header: byte 2: must be the end of the text, got 'x'"},
      {file_of("{\"w\":", 0), "header: byte 5: must be an object, got the end of the text"},
      {entry("3"), "header: byte 5: must be an object, got '3'"},
      {entry("{\"dtype\":3}"), "header: byte 14: must be a string, got '3'"},
      {entry("{\"shape\":[1.5]}"), "header: byte 15: must be an integer of 64 bits, got 1.5"},
      {entry("{\"shape\":[9223372036854775808]}"),
       "header: byte 15: must be an integer of 64 bits, got 9223372036854775808"},
      {entry("{\"dtype\":\"U8\",\"dtype\":\"U8\"}"),
       "header: byte 27: each key must come once, got \"dtype\" twice"},
      {entry("{\"shape\":[],\"shape\":[]}"),
       "header: byte 25: each key must come once, got \"shape\" twice"},
      {entry("{\"data_offsets\":[],\"data_offsets\":[]}"),
       "header: byte 39: each key must come once, got \"data_offsets\" twice"},
      {entry(R"({"shape":[16],"data_offsets":[0,16]})"), "tensor \"w\": must have a dtype"},
      {entry(R"({"dtype":"U8","data_offsets":[0,16]})"), "tensor \"w\": must have a shape"},
      {entry(R"({"dtype":"U8","shape":[16]})"), "tensor \"w\": must have data_offsets"},
      {entry(R"({"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]})"),
       "tensor \"w\": must have at most 8 dimensions, got [1, 1, 1, 1, 1, 1, 1, 1, 1]"},
      {entry(R"({"dtype":"U8","shape":[-16],"data_offsets":[0,16]})"),
       "tensor \"w\": must have a shape of 0 or more that fits in 63 bits, got [-16]"},
      {entry(R"({"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]})"),
       "tensor \"w\": must have a shape of 0 or more that fits in 63 bits, got [4294967296, "
       "4294967296]"},
      {entry(R"({"dtype":"U64","shape":[2305843009213693952],"data_offsets":[0,0]})"),
       "tensor \"w\": must have the bytes of U64 [2305843009213693952], got data_offsets [0, 0]"},
      {entry(R"({"dtype":"U8","shape":[16],"data_offsets":[0,8,16]})"),
       "tensor \"w\": must have data_offsets [begin, end], 0 <= begin <= end, got [0, 8, 16]"},
      {entry(R"({"dtype":"U8","shape":[16],"data_offsets":[-1,15]})"),
       "tensor \"w\": must have data_offsets [begin, end], 0 <= begin <= end, got [-1, 15]"},
      {entry(R"({"dtype":"U8","shape":[8],"data_offsets":[16,8]})"),
       "tensor \"w\": must have data_offsets [begin, end], 0 <= begin <= end, got [16, 8]"},
      {entry(R"({"dtype":"U8","shape":[16],"data_offsets":[1,17]})"),
       "tensor \"w\": must end within the 16 bytes of data, got data_offsets [1, 17]"},
      {entry(R"({"dtype":"F4","shape":[16],"data_offsets":[0,9223372036854775807]})"),
       "tensor \"w\": must end within the 16 bytes of data, got data_offsets [0, "
       "9223372036854775807]"},
      {cut(entry(good), entry(good).size() - 1),
       "tensor \"w\": must end within the 15 bytes of data, got data_offsets [0, 16]"},
      {entry(R"({"dtype":"U16","shape":[16],"data_offsets":[0,16]})"),
       "tensor \"w\": must have the bytes of U16 [16], got data_offsets [0, 16]"},
      {entry(good + ",\"w\":" + good), "tensor \"w\": must be in the file once"},
      {entry(good + R"(,"v":{"dtype":"U8","shape":[1],"data_offsets":[15,16]})"),
       "tensor \"v\": must have bytes of its own, got some of \"w\""},
      {file_of(R"({"__metadata__":3})", 0), "header: byte 16: must be an object, got '3'"},
      {file_of(R"({"__metadata__":{"a":3}})", 0), "header: byte 21: must be a string, got '3'"},
      {file_of(R"({"__metadata__":{"a":"","a":""}})", 0),
       "header: byte 30: each key must come once, got \"a\" twice"},
      {file_of(R"({"__metadata__":{},"__metadata__":{}})", 0),
       "header: byte 34: each key must come once, got __metadata__ twice"},
  };
  const TempFolder folder;
  put(folder / "f", entry(good));
  EXPECT_EQ(SafetensorsFile(folder / "f").names().size(), 1U);
  for (const auto& row : table) {
    put(folder / "f", row.bytes);
    EXPECT_EQ(message_of([&] { SafetensorsFile(folder / "f"); }, Errc::kIo, folder / ""),
              "safetensors: f: " + row.message);
  }
}

// All of the file is there, but no header is that long.
TEST(Safetensors, RefusesAnEndlessHeader) {
  const TempFolder folder;
  put(folder / "f", std::string("\x01\xe1\xf5\x05\0\0\0\0{}", 10));
  std::filesystem::resize_file(folder / "f", 100'000'100);  // takes no room
  EXPECT_EQ(message_of([&] { SafetensorsFile(folder / "f"); }, Errc::kIo, folder / ""),
            "safetensors: f: must hold its header, of at most 100000000 bytes, got a length of "
            "100000001 in a file of "
            "100000100");
}

TEST(Safetensors, SaysWhyAFileCannotBeOpened) {
  const TempFolder folder;
  const auto opened = [&](const std::string& path) {
    return message_of([&] { SafetensorsFile file(path); }, Errc::kIo, folder / "");
  };
  EXPECT_EQ(opened(folder / "none"),
            "safetensors: none must be readable, got No such file or directory");
  std::filesystem::create_directory(folder / "folder");
  EXPECT_EQ(opened(folder / "folder"), "safetensors: folder must be a file, got a folder");
  if (geteuid() == 0) return;  // who may read everything
  put(folder / "closed", "x");
  std::filesystem::permissions(folder / "closed", std::filesystem::perms::none);
  EXPECT_EQ(opened(folder / "closed"),
            "safetensors: closed must be readable, got Permission denied");
}

TEST(Safetensors, SaysWhyATensorCannotBeHad) {
  const TempFolder folder;
  put(folder / "f", file_of(R"({"b":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]}})", 3));
  const SafetensorsFile file(folder / "f");
  EXPECT_EQ(message_of([&] { file.tensor("b"); }, Errc::kIo, folder / ""),
            "safetensors: f: tensor \"b\": a BOOL must be 0 or 1, got 2");
  EXPECT_EQ(message_of([&] { file.tensor("c"); }, Errc::kIo, folder / ""),
            "safetensors: f: tensor \"c\": must be in the file, got no such name");
  EXPECT_EQ(message_of([&] { static_cast<void>(file.info("c")); }, Errc::kIo, folder / ""),
            "safetensors: f: tensor \"c\": must be in the file, got no such name");
}

// Every byte before the data changed in several ways: an error, or a file whose tensors can all be read.
TEST(Safetensors, AChangedHeaderIsAnErrorOrAView) {
  const TempFolder folder;
  const std::string bytes = read_whole(golden("ours.safetensors"), "test");
  std::uint64_t header = 0;
  std::memcpy(&header, bytes.data(), 8);
  put(folder / "f", bytes);
  std::fstream on_disk(folder / "f", std::ios::binary | std::ios::in | std::ios::out);
  const auto change = [&](std::size_t at, char to) {
    on_disk.seekp(static_cast<std::streamoff>(at)).put(to).flush();
  };
  int refused = 0;
  unsigned sum = 0;
  for (std::size_t at = 0; at < 8 + header; ++at) {
    for (const char flip : {'\x01', '\x08', '\x10', '\x80'}) {
      change(at, static_cast<char>(bytes[at] ^ flip));
      try {
        const SafetensorsFile file(folder / "f");
        for (const std::string& name : file.names()) {
          if (!file.info(name).dtype || file.info(name).dtype == DType::kBool) continue;
          for (const char c : bytes_of(file.tensor(name))) sum += static_cast<unsigned char>(c);
        }
      } catch (const Error& e) {
        EXPECT_EQ(std::string(e.what()).find("safetensors: " + (folder / "f")), 0U) << e.what();
        ++refused;
      }
    }
    change(at, bytes[at]);
  }
  EXPECT_GT(refused, 500);
  EXPECT_GT(sum, 0U);
}

// ---- writing ----

TEST(Safetensors, WritesTheBytesThatOthersRead) {
  const TempFolder folder;
  const std::vector<NamedTensor> tensors{{"z", golden_tensor({3}, DType::kU8)},
                                         {"b", golden_tensor({2, 3}, DType::kF32)},
                                         {"none", golden_tensor({0, 4}, DType::kI64)},
                                         {"a", golden_tensor({5}, DType::kI16)},
                                         {"c", golden_tensor({}, DType::kF32)}};
  write_safetensors(folder / "f", tensors, {{"format", "mlx"}, {"note", "\u00e9\""}});
  EXPECT_EQ(read_whole(folder / "f", "test"), read_whole(golden("ours.safetensors"), "test"));
  EXPECT_EQ(folder.files(), 1U);
}

class SafetensorsOn : public test::OnDevice {};

TEST_P(SafetensorsOn, ReadsWhatItWrote) {
  const TempFolder folder;
  std::vector<NamedTensor> tensors;
  std::vector<Tensor> want;
  const auto add = [&](const std::string& name, const Tensor& on_host, const Tensor& contents) {
    const Tensor t = encoder().empty(on_host.shape(), on_host.dtype());
    if (t.size() > 0) encoder().upload(on_host.data(), on_host.bytes(), t);
    tensors.push_back({name, t});
    want.push_back(contents);
  };
  for (std::size_t i = 0; i < kDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    const Tensor values = golden_tensor({3, 5}, dtype);
    add(name_of(dtype), values, values);
  }
  const Tensor matrix = golden_tensor({3, 4}, DType::kI32);
  Tensor turned = Device::cpu().zeros({4, 3}, DType::kI32);
  for (std::size_t i = 0; i < 12; ++i) {
    turned.host<std::int32_t>()[i] = matrix.host<std::int32_t>()[i % 3 * 4 + i / 3];
  }
  add("strided", matrix, turned);
  tensors.back().tensor = tensors.back().tensor.transpose({1, 0});
  const Tensor large = golden_tensor({(16 << 20) / 2 + 3}, DType::kU16);  // more than one piece
  add("large", large, large);
  const Tensor part = golden_tensor({7}, DType::kU8);
  add("part", part, part.slice(0, 2, 5));
  tensors.back().tensor = tensors.back().tensor.slice(0, 2, 5);

  write_safetensors(folder / "f", tensors);
  const SafetensorsFile file(folder / "f");
  EXPECT_EQ(file.names().size(), tensors.size());
  EXPECT_TRUE(file.metadata().empty());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Tensor t = file.tensor(tensors[i].name);
    EXPECT_EQ(t.dtype(), want[i].dtype());
    EXPECT_EQ(t.shape(), want[i].shape());
    EXPECT_TRUE(bytes_of(t) == bytes_of(want[i])) << tensors[i].name;
    EXPECT_TRUE(t.buffer().is_foreign()) << tensors[i].name;  // aligned: in place
  }
}
MT_ON_EVERY_BACKEND(SafetensorsOn);

TEST(Safetensors, DoesNotWriteWhatCannotBeRead) {
  const TempFolder folder;
  const Tensor t = golden_tensor({2}, DType::kF32);
  const auto said = [&](const std::vector<NamedTensor>& tensors) {
    return message_of([&] { write_safetensors(folder / "f", tensors); }, Errc::kArgument,
                      folder / "");
  };
  EXPECT_EQ(said({{"a", t}, {"b", t}, {"a", t}}), "safetensors: f: tensor \"a\": must come once");
  EXPECT_EQ(said({{"__metadata__", t}}),
            "safetensors: f: tensor \"__metadata__\": must have another name");
  EXPECT_EQ(said({{"a", Tensor::meta({2})}}), "safetensors: f: tensor \"a\": must have memory");
  EXPECT_EQ(said({{"a\xff", t}}), "json: text must be UTF-8, got byte 0xff");
  EXPECT_EQ(folder.files(), 0U);
}

TEST(Safetensors, AFailedWriteLeavesWhatWasThere) {
  const TempFolder folder;
  write_safetensors(folder / "f",
                    std::vector<NamedTensor>{{"old", golden_tensor({2}, DType::kF32)}});
  const std::string before = read_whole(folder / "f", "test");
  const std::vector<NamedTensor> tensors{{"new", golden_tensor({5000}, DType::kF32)}};
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  rlimit small = limit;
  small.rlim_cur = 1000;  // bytes that a file may have
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string said =
      message_of([&] { write_safetensors(folder / "f", tensors); }, Errc::kIo, folder / "");
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  std::signal(SIGXFSZ, SIG_DFL);
  EXPECT_EQ(said, "safetensors: f must be writable, got File too large");
  EXPECT_EQ(read_whole(folder / "f", "test"), before);
  EXPECT_EQ(folder.files(), 1U);
}

}  // namespace
}  // namespace mlxtape::formats
