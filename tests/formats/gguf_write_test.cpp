#include "mlxtape/formats/gguf_write.h"

#include <gtest/gtest.h>

#include "formats/gguf_support.h"
#include "formats/support.h"
#include "mlxtape/formats/gguf.h"

namespace mlxtape::formats {
namespace {

using gguf_test::Raw;
using gguf_test::raw;
using gguf_test::text;

GgufTensorToWrite tensor(const std::string& name, const Shape& shape, GgufType type,
                         const std::string& bytes) {
  return {name, shape, type, [bytes](const auto& put) {
            const std::size_t half = bytes.size() / 2;  // pieces are one behind the other
            const auto all = std::as_bytes(std::span(bytes.data(), bytes.size()));
            put(all.first(half));
            put(all.subspan(half));
          }};
}

TEST(GgufWrite, TheBytesAreThoseOfTheLayout) {
  const TempFolder folder;
  const std::vector<GgufKey> keys{{"general.architecture", std::string("llama")},
                                  {"u16", std::uint16_t{7}},
                                  {"i32", std::int32_t{-1}},
                                  {"u64", std::uint64_t{1} << 40U},
                                  {"f32", 0.5F},
                                  {"bool", true},
                                  {"texts", std::vector<std::string>{"a", ""}},
                                  {"u32s", std::vector<std::uint32_t>{1, 2}},
                                  {"i32s", std::vector<std::int32_t>{}},
                                  {"f32s", std::vector<float>{1}}};
  const std::string a(24, 'a'), b(18, 'b'), c(1, 'c');
  const auto paths = write_gguf(
      folder / "f.gguf", keys,
      std::vector{tensor("a", {2, 3}, GgufType::kF32, a), tensor("b", {1, 32}, GgufType::kQ40, b),
                  tensor("c", {1}, GgufType::kI8, c)});
  Raw want;
  want.string("general.architecture", "llama").key("u16", 2, raw<std::uint16_t>(7));
  want.key("i32", 5, raw(-1)).key("u64", 10, raw(std::uint64_t{1} << 40U));
  want.key("f32", 6, raw(0.5F)).key("bool", 7, "\1");
  want.array("texts", 8, 2, text("a") + text("")).array("u32s", 4, 2, raw(1U) + raw(2U));
  want.array("i32s", 5, 0, "").array("f32s", 6, 1, raw(1.0F));
  want.tensor("a", {3, 2}, 0, 0).tensor("b", {32, 1}, 2, 32).tensor("c", {1}, 24, 64);
  want.data = a + std::string(8, '\0') + b + std::string(14, '\0') + c + std::string(31, '\0');
  EXPECT_EQ(read_whole(folder / "f.gguf", "test"), want.file());
  EXPECT_EQ(paths, std::vector<std::string>{folder / "f.gguf"});
  EXPECT_EQ(folder.files(), 1U);
  EXPECT_EQ(GgufFile(folder / "f.gguf").tensors().size(), 3U);
}

TEST(GgufWrite, TheAlignmentIsWrittenWhereItIsNotTheUsual) {
  const TempFolder folder;
  write_gguf(folder / "f.gguf", {},
             std::vector{tensor("a", {1}, GgufType::kF32, "abcd"),
                         tensor("b", {1}, GgufType::kF32, "efgh")},
             {128, 0});
  const GgufFile file(folder / "f.gguf");
  EXPECT_EQ(file.alignment(), 128U);
  EXPECT_EQ(file.tensor("b").begin - file.tensor("a").begin, 128U);
  EXPECT_EQ(file.tensor("a").begin % 128, 0U);
}

TEST(GgufWrite, LargeModelsBecomeParts) {
  const TempFolder folder;
  std::vector<GgufTensorToWrite> tensors;
  for (const char name : {'a', 'b', 'c', 'd'}) {
    tensors.push_back(tensor(std::string(1, name), {10}, GgufType::kI8, std::string(10, name)));
  }
  const auto paths = write_gguf(folder / "m.gguf", std::vector<GgufKey>{{"k", std::uint32_t{5}}},
                                tensors, {32, 25});
  EXPECT_EQ(paths, (std::vector<std::string>{folder / "m-00001-of-00002.gguf",
                                             folder / "m-00002-of-00002.gguf"}));
  const GgufFile file(paths[0]);
  EXPECT_EQ(file.tensors().size(), 4U);
  EXPECT_EQ(file.tensor("b").part, 0U);
  EXPECT_EQ(file.tensor("c").part, 1U);
  EXPECT_EQ(static_cast<char>(file.bytes(file.tensor("d"))[9]), 'd');
  EXPECT_EQ(file.whole("k"), 5);
  EXPECT_EQ(file.whole("split.tensors.count"), 4);
  // One tensor of more bytes than a part may have is a part.
  EXPECT_EQ(write_gguf(folder / "n.gguf", {}, tensors, {32, 1}).size(), 4U);
}

TEST(GgufWrite, DoesNotWriteWhatCannotBeRead) {
  const TempFolder folder;
  const auto said = [&](const std::vector<GgufKey>& keys,
                        const std::vector<GgufTensorToWrite>& tensors,
                        GgufWriteOptions options = {}) {
    return message_of([&] { write_gguf(folder / "f", keys, tensors, options); }, Errc::kArgument,
                      folder / "");
  };
  const auto one = [](const std::string& name, const Shape& shape, GgufType type = GgufType::kF32) {
    return std::vector{tensor(name, shape, type, "")};
  };
  const std::string dims = " must have 1 to 4 dimensions and rows of whole blocks of ";
  EXPECT_EQ(said({{"a", true}, {"a", true}}, {}),
            "gguf: f: key \"a\" must come once, and not be one that the writer sets itself");
  EXPECT_EQ(
      said({{"split.count", true}}, {}),
      "gguf: f: key \"split.count\" must come once, and not be one that the writer sets itself");
  EXPECT_EQ(
      said({{"general.alignment", true}}, {}),
      "gguf: f: key \"general.alignment\" must come once, and not be one that the writer sets "
      "itself");
  EXPECT_EQ(said({{"\xff", true}}, {}), "gguf: f: a key must be UTF-8, got \\xff");
  EXPECT_EQ(said({{"k", std::string("\xff")}}, {}), "gguf: f: k must be UTF-8, got \\xff");
  EXPECT_EQ(said({{"k", std::vector<std::string>{"\xff"}}}, {}),
            "gguf: f: k must be UTF-8, got \\xff");
  EXPECT_EQ(said({}, {tensor("t", {1}, GgufType::kF32, ""), tensor("t", {1}, GgufType::kF32, "")}),
            "gguf: f: tensor \"t\" must come once");
  EXPECT_EQ(said({}, one("", {1})),
            "gguf: f: tensor \"\" must have a name of UTF-8 of 1 to 63 bytes");
  EXPECT_EQ(said({}, one(std::string(64, 't'), {1})),
            "gguf: f: tensor \"" + std::string(64, 't') +
                "\" must have a name of UTF-8 of 1 to 63 bytes");
  EXPECT_EQ(said({}, one("t", {})), "gguf: f: tensor \"t\"" + dims + "1 for F32, got []");
  EXPECT_EQ(said({}, one("t", {1, 1, 1, 1, 1})),
            "gguf: f: tensor \"t\"" + dims + "1 for F32, got [1, 1, 1, 1, 1]");
  EXPECT_EQ(said({}, one("t", {0})), "gguf: f: tensor \"t\"" + dims + "1 for F32, got [0]");
  EXPECT_EQ(said({}, one("t", {33}, GgufType::kQ80)),
            "gguf: f: tensor \"t\"" + dims + "32 for Q8_0, got [33]");
  EXPECT_EQ(said({}, {}, {48, 0}),
            "gguf: f: the alignment must be a power of 2 up to 1048576, got 48");
  EXPECT_EQ(folder.files(), 0U);
}

TEST(GgufWrite, AFailedWriteLeavesWhatWasThere) {
  const TempFolder folder;
  put(folder / "f.gguf", "old");
  const std::vector<GgufTensorToWrite> tensors{{"t", {1}, GgufType::kF32, [](const auto&) {
                                                  throw Error(Errc::kIo, "no bytes");
                                                }}};
  EXPECT_EQ(message_of([&] { write_gguf(folder / "f.gguf", {}, tensors); }), "no bytes");
  EXPECT_EQ(read_whole(folder / "f.gguf", "test"), "old");
  EXPECT_EQ(folder.files(), 1U);
}

}  // namespace
}  // namespace mlxtape::formats
