#include "mlxtape/formats/gguf.h"

#include <gtest/gtest.h>

#include <cmath>

#include "formats/gguf_support.h"
#include "formats/support.h"

namespace mlxtape::formats {
namespace {

using gguf_test::Raw;
using gguf_test::raw;
using gguf_test::text;

std::string golden(const std::string& name) { return std::string(MLXTAPE_GOLDEN) + "/" + name; }

// A file with metadata and two tensors that lie where they say.
Raw good() {
  Raw file;
  file.string("general.architecture", "llama").u32("llama.block_count", 1);
  file.tensor("a", {4, 2}, 0, 0).tensor("b", {32}, 2, 32);
  file.data = std::string(32 + 18, '\1');
  return file;
}

std::string refusal(const std::string& bytes) {
  const TempFolder folder;
  put(folder / "f.gguf", bytes);
  return message_of([&] { GgufFile file(folder / "f.gguf"); }, Errc::kIo, folder / "");
}

// ---- what others wrote ----

TEST(Gguf, ReadsMetadataOfEveryType) {
  const GgufFile file(golden("types.gguf"));
  EXPECT_EQ(file.version(), 3U);
  EXPECT_EQ(file.alignment(), 32U);
  EXPECT_EQ(file.text("general.architecture"), "llama");
  EXPECT_EQ(file.whole("of.u8"), 200);
  EXPECT_EQ(file.whole("of.i8"), -100);
  EXPECT_EQ(file.whole("of.u16"), 60000);
  EXPECT_EQ(file.whole("of.i16"), -30000);
  EXPECT_EQ(file.whole("of.u32"), 4000000000);
  EXPECT_EQ(file.whole("of.i32"), -2000000000);
  EXPECT_EQ(file.whole("of.i64"), std::numeric_limits<std::int64_t>::min());
  EXPECT_EQ(file.number("of.f32"), static_cast<double>(0.1F));
  EXPECT_EQ(file.number("of.f64"), 0.1);
  EXPECT_EQ(file.number("of.u8"), 200.0);
  EXPECT_EQ(file.truth("of.bool"), true);
  EXPECT_EQ(file.text("of.string"), "\u00e9 \u6c34\n");
  EXPECT_EQ(file.texts("of.strings"), (std::vector<std::string_view>{"", "a", "\u6c34"}));
  EXPECT_EQ(file.wholes("of.wholes"), (std::vector<std::int64_t>{1, -2, 3}));
  EXPECT_EQ(file.numbers("of.numbers"), (std::vector<double>{0.5, -1.5}));
  EXPECT_TRUE(file.is_array("of.wholes"));
  EXPECT_FALSE(file.is_array("of.u8"));
  const auto& arrays = std::get<GgufArray>(file.metadata().at("of.arrays").value);
  EXPECT_EQ(arrays.of, GgufValueType::kArray);
  EXPECT_EQ(arrays.count, 2U);
  EXPECT_EQ(file.whole("no.such.key"), std::nullopt);
  EXPECT_EQ(file.texts("no.such.key"), std::nullopt);
}

TEST(Gguf, SaysWhichKeyIsOfAnotherKind) {
  const GgufFile file(golden("types.gguf"));
  const auto said = [&](const auto& fn) {
    return message_of(fn, Errc::kIo, std::string(MLXTAPE_GOLDEN) + "/");
  };
  EXPECT_EQ(
      said([&] { file.whole("of.u64"); }),
      "gguf: types.gguf: key \"of.u64\" must be a whole number that fits in 63 bits, got u64");
  EXPECT_EQ(
      said([&] { file.whole("of.f32"); }),
      "gguf: types.gguf: key \"of.f32\" must be a whole number that fits in 63 bits, got f32");
  EXPECT_EQ(said([&] { file.number("of.string"); }),
            "gguf: types.gguf: key \"of.string\" must be a number, got string");
  EXPECT_EQ(said([&] { file.truth("of.u8"); }),
            "gguf: types.gguf: key \"of.u8\" must be a bool, got u8");
  EXPECT_EQ(said([&] { file.text("of.u8"); }),
            "gguf: types.gguf: key \"of.u8\" must be a string of UTF-8, got u8");
  EXPECT_EQ(said([&] { file.texts("of.u8"); }),
            "gguf: types.gguf: key \"of.u8\" must be an array of strings, got u8");
  EXPECT_EQ(said([&] { file.texts("of.wholes"); }),
            "gguf: types.gguf: key \"of.wholes\" must be an array of strings, got one of i32");
  EXPECT_EQ(
      said([&] { file.wholes("of.numbers"); }),
      "gguf: types.gguf: key \"of.numbers\" must be an array of whole numbers, got one of f32");
  EXPECT_EQ(
      said([&] { file.wholes("of.strings"); }),
      "gguf: types.gguf: key \"of.strings\" must be an array of whole numbers, got one of string");
  EXPECT_EQ(said([&] { file.numbers("of.arrays"); }),
            "gguf: types.gguf: key \"of.arrays\" must be an array of numbers, got one of array");
  EXPECT_EQ(said([&] { static_cast<void>(file.tensor("x")); }),
            "gguf: types.gguf: tensor \"x\" must be in the file");
}

TEST(Gguf, ReadsAllPartsOfASplitModel) {
  const GgufFile file(golden("split-00001-of-00003.gguf"));
  EXPECT_EQ(file.files().size(), 3U);
  EXPECT_EQ(file.tensors().size(), 6U);
  EXPECT_EQ(file.total_bytes(), 4U * 3 * 21);
  for (std::int64_t i = 0; i < 6; ++i) {
    const GgufTensor& t = file.tensor("t" + std::to_string(i));
    EXPECT_EQ(t.shape, (Shape{i + 1, 3}));
    EXPECT_EQ(t.part, static_cast<std::size_t>(i / 2));
    std::vector<float> values(static_cast<std::size_t>(3 * (i + 1)));
    dequantize(t.type, file.bytes(t), values);
    EXPECT_EQ(values, std::vector<float>(values.size(), static_cast<float>(i)));
  }
}

TEST(Gguf, SaysWhichPartsAreMissingOrWrong) {
  const TempFolder folder;
  const auto opened = [&](const std::string& name) {
    return message_of([&] { GgufFile file(folder / name); }, Errc::kIo, folder / "");
  };
  const auto bring = [&](const std::string& from, const std::string& to) {
    put(folder / to, read_whole(golden(from), "test"));
  };
  bring("split-00001-of-00003.gguf", "m-00001-of-00003.gguf");
  EXPECT_EQ(opened("m-00001-of-00003.gguf"),
            "gguf: m-00001-of-00003.gguf: its other parts must lie beside it, missing: "
            "m-00002-of-00003.gguf, m-00003-of-00003.gguf");
  bring("split-00002-of-00003.gguf", "m-00002-of-00003.gguf");
  EXPECT_EQ(opened("m-00002-of-00003.gguf"),
            "gguf: m-00002-of-00003.gguf: is part 2 of several: open the first, "
            "m-00001-of-00003.gguf");
  bring("split-00002-of-00003.gguf", "m-00003-of-00003.gguf");
  EXPECT_EQ(opened("m-00001-of-00003.gguf"),
            "gguf: m-00001-of-00003.gguf: the part m-00003-of-00003.gguf must have split.no 2, got "
            "1");
  bring("split-00003-of-00003.gguf", "m-00003-of-00003.gguf");
  EXPECT_EQ(opened("m-00001-of-00003.gguf"), "no error");
  Raw first = good();
  first.key("split.no", 2, raw<std::uint16_t>(0)).key("split.count", 2, raw<std::uint16_t>(2));
  first.key("split.tensors.count", 5, raw(3));
  Raw second;
  second.key("split.no", 2, raw<std::uint16_t>(1));
  put(folder / "n-00001-of-00002.gguf", first.file());
  put(folder / "n-00002-of-00002.gguf", second.file());
  EXPECT_EQ(opened("n-00001-of-00002.gguf"),
            "gguf: n-00001-of-00002.gguf: its parts must hold 3 tensors, got 2");
  bring("split-00001-of-00003.gguf", "one.gguf");
  EXPECT_EQ(opened("one.gguf"),
            "gguf: one.gguf: is one of 3 parts, and its name must say so: "
            "NAME-00001-of-00003.gguf");
}

TEST(Gguf, TensorsLieWhereTheFileSays) {
  const TempFolder folder;
  Raw raw_file = good();
  raw_file.data = std::string("abcdefghijklmnopqrstuvwxyz012345") + std::string(18, 'q') + "rest";
  put(folder / "f", raw_file.file());
  const GgufFile file(folder / "f");
  const GgufTensor& a = file.tensor("a");
  EXPECT_EQ(a.shape, (Shape{2, 4}));
  const auto bytes = file.bytes(a);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()),
            "abcdefghijklmnopqrstuvwxyz012345");
  const GgufTensor& b = file.tensor("b");
  EXPECT_EQ(b.type, GgufType::kQ40);
  EXPECT_EQ(b.bytes, 18U);
  EXPECT_EQ(static_cast<char>(file.bytes(b)[0]), 'q');
  EXPECT_EQ(file.total_bytes(), 50U);
}

TEST(Gguf, TheAlignmentIsTheFiles) {
  for (const std::uint32_t alignment : {1U, 8U, 64U, 1U << 20U}) {
    Raw file;
    file.u32("general.alignment", alignment).tensor("a", {1}, 0, alignment);
    file.data = std::string(alignment + 4, 'x');
    EXPECT_EQ(refusal(file.file(alignment)), "no error") << alignment;
  }
  EXPECT_EQ(refusal(Raw{}.file()), "no error");  // of nothing
  EXPECT_EQ(refusal(Raw{}.head()), "no error");
}

TEST(Gguf, ReadsVersion2AsVersion3) {
  Raw file = good();
  file.version = 2;
  EXPECT_EQ(refusal(file.file()), "no error");
}

TEST(Gguf, KnowsItsFilesByName) {
  EXPECT_TRUE(is_gguf_path("a/b.gguf"));
  EXPECT_TRUE(is_gguf_path("B.GGuf"));
  EXPECT_FALSE(is_gguf_path("gguf"));
  EXPECT_FALSE(is_gguf_path("a.gguf/b"));
}

// ---- lies ----

constexpr std::uint64_t kMost = ~std::uint64_t{0};

struct Lie {
  std::string bytes, message;
};

std::vector<Lie> lies_of_the_header() {
  const auto version = [](std::uint32_t v) {
    Raw file = good();
    file.version = v;
    return file.file();
  };
  const auto counts = [](std::uint64_t tensors, std::uint64_t keys) {
    Raw file;
    file.count = tensors;
    file.keys = keys;
    return file.head();
  };
  return {
      {"", "must begin with \"GGUF\": this is no GGUF file"},
      {"GGU", "must begin with \"GGUF\": this is no GGUF file"},
      {"GGML" + std::string(60, '\0'), "must begin with \"GGUF\": this is no GGUF file"},
      {"GGUF", "the version must lie in the file, got 4 bytes where 0 are left"},
      {version(0), "must be of version 2 or 3, got 0"},
      {version(1),
       "must be of version 2 or 3, got 1: convert the original model again with a newer llama.cpp"},
      {version(4), "must be of version 2 or 3, got 4"},
      {version(0x03000000),
       "is big-endian, which is not supported: turn it around with gguf-convert-endian of the "
       "Python package gguf"},
      {"GGUF" + raw(3U) + raw<std::uint64_t>(0),
       "the number of keys must lie in the file, got 8 bytes where 0 are left"},
      {counts(0, 1), "the keys must fit in the file, got 1 where 0 bytes are left"},
      {counts(0, kMost),
       "the keys must fit in the file, got 18446744073709551615 where 0 bytes are left"},
      {counts(1, 0), "the tensors must fit in the file, got 1 where 0 bytes are left"},
      {counts(kMost, 0) + std::string(100, 'x'),
       "the tensors must fit in the file, got 18446744073709551615 where 100 bytes are left"},
  };
}

std::vector<Lie> lies_of_metadata() {
  const auto key = [](std::uint32_t type, const std::string& value) {
    return Raw{}.key("k", type, value).head();
  };
  const auto array = [&](std::uint32_t of, std::uint64_t size, const std::string& values) {
    return Raw{}.array("k", of, size, values).head();
  };
  const std::string nested = raw(9U) + raw<std::uint64_t>(1);
  return {
      {Raw{}.key("", 0, "x").head(), "a key must be UTF-8 of 1 to 65535 bytes, got \"\""},
      {Raw{}.key("\xff", 0, "x").head(), "a key must be UTF-8 of 1 to 65535 bytes, got \"\\xff\""},
      {Raw{}.key(std::string(65536, 'k'), 0, "x").head(),
       "a key must be UTF-8 of 1 to 65535 bytes, got \"" + std::string(200, 'k') +
           "... (65536 bytes)\""},
      {Raw{}.u32("k", 1).u32("k", 2).head(), "each key must come once, got \"k\" twice"},
      {key(13, "xxxxxxxx"), "key \"k\" must be of a type from 0 to 12, got 13"},
      {key(~0U, "xxxxxxxx"), "key \"k\" must be of a type from 0 to 12, got 4294967295"},
      {key(7, "\2"), "key \"k\" must be a bool of 0 or 1, got 2"},
      {key(10, "1234567"), "key \"k\" must lie in the file, got 8 bytes where 7 are left"},
      {key(8, raw(kMost) + "abc"),
       "key \"k\" must lie in the file, got 18446744073709551615 bytes where 3 are left"},
      {key(8, raw<std::uint64_t>(4) + "abc"),
       "key \"k\" must lie in the file, got 4 bytes where 3 are left"},
      {array(13, 0, "x"), "key \"k\" must be of a type from 0 to 12, got 13"},
      {array(4, 2, "1234567"), "key \"k\" must fit in the file, got 2 where 7 bytes are left"},
      {array(12, (kMost >> 3U) + 1, "12345678"),
       "key \"k\" must fit in the file, got 2305843009213693952 where 8 bytes are left"},
      {array(8, 2, text("abcdefgh")),
       "key \"k\" must lie in the file, got 8 bytes where 0 are left"},
      {array(8, 1, raw(kMost)),
       "key \"k\" must lie in the file, got 18446744073709551615 bytes where 0 are left"},
      {array(7, 2, "\1\3"), "key \"k\" must be a bool of 0 or 1, got 3"},
      {array(9, 1, nested + nested + nested + raw(0U) + raw<std::uint64_t>(1) + "x"),
       "key \"k\" must have at most 4 levels of arrays"},
      {array(9, 1, raw(4U) + raw(kMost)),
       "key \"k\" must fit in the file, got 18446744073709551615 where 0 bytes are left"},
      {Raw{}.u32("general.alignment", 0).head(),
       "key \"general.alignment\" must be a power of 2 up to 1048576, as u32, got u32"},
      {Raw{}.u32("general.alignment", 24).head(),
       "key \"general.alignment\" must be a power of 2 up to 1048576, as u32, got u32"},
      {Raw{}.u32("general.alignment", 1U << 21U).head(),
       "key \"general.alignment\" must be a power of 2 up to 1048576, as u32, got u32"},
      {Raw{}.key("general.alignment", 0, "\x20").head(),
       "key \"general.alignment\" must be a power of 2 up to 1048576, as u32, got u8"},
      {Raw{}.string("general.alignment", "32").head(),
       "key \"general.alignment\" must be a power of 2 up to 1048576, as u32, got string"},
      {Raw{}.string("split.count", "2").head(),
       "key \"split.count\" must be a whole number that fits in 63 bits, got string"},
      {Raw{}.u32("split.no", 1).head(), "is part 2 of several: open the first"},
      {Raw{}.u32("split.count", ~0U).head(),
       "is one of 4294967295 parts, and its name must say so: NAME-00001-of-99999.gguf"},
  };
}

std::vector<Lie> lies_of_tensors() {
  const auto one = [](const std::vector<std::uint64_t>& dims, std::uint32_t type = 0,
                      std::uint64_t offset = 0, std::size_t data = 64) {
    Raw file;
    file.tensor("w", dims, type, offset);
    file.data = std::string(data, 'x');
    return file.file();
  };
  const auto two = [](std::string_view first, std::uint64_t offset, std::string_view second) {
    Raw file;
    file.tensor(first, {16}, 0, 0).tensor(second, {8}, 0, offset);
    file.data = std::string(128, 'x');
    return file.file();
  };
  const auto dims = [](const std::string& got) {
    return "tensor \"w\" must have dimensions from 1 on whose product fits in 63 bits, got " + got;
  };
  const std::string cut = " on: the file may be cut short";
  return {
      {Raw{}.tensor("", {1}, 0, 0).head(),
       "a tensor's name must be UTF-8 of 1 to 255 bytes, got \"\""},
      {Raw{}.tensor("\xff", {1}, 0, 0).head(),
       "a tensor's name must be UTF-8 of 1 to 255 bytes, got \"\\xff\""},
      {Raw{}.tensor(std::string(256, 'n'), {1}, 0, 0).head(),
       "a tensor's name must be UTF-8 of 1 to 255 bytes, got \"" + std::string(200, 'n') +
           "... (256 bytes)\""},
      {one({}), "tensor \"w\" must have 1 to 4 dimensions, got 0"},
      {one({1, 1, 1, 1, 1}), "tensor \"w\" must have 1 to 4 dimensions, got 5"},
      {one({0}), dims("0 as number 0")},
      {one({4, 0}), dims("0 as number 1")},
      {one({kMost}), dims("18446744073709551615 as number 0")},
      {one({std::uint64_t{1} << 32U, std::uint64_t{1} << 31U}), dims("2147483648 as number 1")},
      {one({std::uint64_t{1} << 62U}), "tensor \"w\" must have a size that fits in 63 bits"},
      {one({33}, 2), "tensor \"w\" must have rows of whole blocks of 32 for Q4_0, got rows of 33"},
      {one({128, 2}, 12),
       "tensor \"w\" must have rows of whole blocks of 256 for Q4_K, got rows of 128"},
      {one({1}, 16),
       "tensor \"w\" is IQ2_XXS, which is not supported: use a file of another type, for example "
       "Q4_K_M or Q8_0"},
      {one({1}, 9), "tensor \"w\" is Q8_1, a type that llama.cpp has in memory and no file has"},
      {one({1}, 4), "tensor \"w\" is of type 4, which is unknown"},
      {one({1}, ~0U), "tensor \"w\" is of type 4294967295, which is unknown"},
      {one({4}, 0, 16), "tensor \"w\" must lie at a multiple of 32, got 16"},
      {one({17}), "tensor \"w\" must lie within the 64 bytes of data, got 68 from 0" + cut},
      {one({16}, 0, 32), "tensor \"w\" must lie within the 64 bytes of data, got 64 from 32" + cut},
      {one({16}, 0, kMost - 31),
       "tensor \"w\" must lie within the 64 bytes of data, got 64 from 18446744073709551584" + cut},
      {Raw{}.tensor("w", {16}, 0, 0).head(),
       "tensor \"w\" must lie within the 0 bytes of data, got 64 from 0" + cut},
      {two("v", 32, "w"), "tensor \"w\" must have bytes of its own, got some of \"v\""},
      {two("w", 64, "w"), "tensor \"w\" must be there once"},
  };
}

TEST(Gguf, RefusesWhatCannotBeTrue) {
  EXPECT_EQ(refusal(good().file()), "no error");
  for (const auto& table : {lies_of_the_header(), lies_of_metadata(), lies_of_tensors()}) {
    for (const Lie& lie : table) EXPECT_EQ(refusal(lie.bytes), "gguf: f.gguf: " + lie.message);
  }
}

// Cut anywhere: an error, never a read past the end.
TEST(Gguf, RefusesAFileThatIsCutShort) {
  const std::string whole =
      good().string("k", "text").array("a", 8, 2, text("x") + text("yz")).file();
  EXPECT_EQ(refusal(whole), "no error");
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_NE(refusal(whole.substr(0, size)), "no error") << size;
  }
}

// Every byte of a real file's head changed: an error, or a file whose tensors can all be read.
TEST(Gguf, AChangedHeadIsAnErrorOrAView) {
  const TempFolder folder;
  const std::string bytes = read_whole(golden("types.gguf"), "test");
  int refused = 0, read = 0;
  float sum = 0;
  for (std::size_t at = 0; at < 3000; ++at) {
    std::string changed = bytes;
    changed[at] = static_cast<char>(changed[at] ^ (at % 2 == 0 ? '\x80' : '\x01'));
    put(folder / "f", changed);
    try {
      const GgufFile file(folder / "f");
      for (const auto& [name, tensor] : file.tensors()) {
        std::vector<float> numbers(static_cast<std::size_t>(*element_count(tensor.shape)));
        dequantize(tensor.type, file.bytes(tensor), numbers);
        sum += numbers.back();
      }
      ++read;
    } catch (const Error& e) {
      EXPECT_EQ(std::string(e.what()).find("gguf: "), 0U) << e.what();
      ++refused;
    }
  }
  EXPECT_GT(refused, 1000);
  EXPECT_GT(read, 300);
  EXPECT_FALSE(std::isnan(sum) && sum == 0);
}

}  // namespace
}  // namespace mlxtape::formats
